// The walk through the chunks of a head, from image to image: three roles of a block that meet at barriers in shared memory. One
// thread brings images, two warpgroups with 64 value columns each keep the state in their accumulators, one norms and gates.

#define STAGES 2
// Behind the stages: outputs of two chunks as halves, laid out as images are; the gate's numbers of one chunk in f32.
#define OUTPUT (STAGES * IMAGE_BYTES)
#define OUTPUT_BYTES 16384
#define GATE (OUTPUT + 2 * OUTPUT_BYTES)

struct Walk {
    u64 full[STAGES], empty[STAGES], ready[2], taken[2];
};
DEVICE void walk_begin(Walk &w) {
    for (int i = 0; i < STAGES; i++) {
        barrier_init(shared_address(w.full + i), 1);
        barrier_init(shared_address(w.empty + i), 2);
    }
    for (int i = 0; i < 2; i++) {
        barrier_init(shared_address(w.ready + i), 256);
        barrier_init(shared_address(w.taken + i), 128);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

DEVICE u32 load_flag(const u32 *p) {
    u32 v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
DEVICE void store_flag(u32 *p, u32 v) { asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
// Sixteen bytes in one piece, whatever stands around it.
DEVICE void write_four(float *to, float4 v) {
    asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}
// Global memory written or read by copies before and after.
DEVICE void copies_ordered() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

DEVICE u32 *progress_of(const Args &in, int walker) { return in.counters + 32 + walker; }
DEVICE u32 *flag_of(const Args &in, int walker, u32 number) { return in.counters + 32 + in.walkers + walker * PLACES + number % PLACES; }
DEVICE u8 *image_of(const Args &in, int walker, u32 number) { return in.images + ((u64)(number % PLACES) * in.walkers + walker) * IMAGE_BYTES; }

// Images of a walker's heads in turn; one thread.
DEVICE void fetch_images(const Args &in, Walk &w, u32 base, int walker) {
    u32 number = 0;
    for (int item = walker; item < in.segment_count * in.heads; item += in.walkers) {
        const int count = chunks_of(in.segments[item / in.heads]).count;
        for (int chunk = 0; chunk < count; chunk++, number++) {
            const u32 stage = number % STAGES, full = shared_address(w.full + stage);
            if (number >= STAGES) barrier_wait(shared_address(w.empty + stage), (number / STAGES - 1) & 1);
            while (load_flag(flag_of(in, walker, number)) != number + 1) __nanosleep(40);
            copies_ordered();
            barrier_expect(full, IMAGE_BYTES);
            copy_bulk(base + stage * IMAGE_BYTES, image_of(in, walker, number), IMAGE_BYTES, full);
        }
    }
}

// out = o / rms(o) * weight * sigmoid(z); the segment's last raw columns to the ring. A warp has 16 rows, a lane four channels.
DEVICE void norm_outputs(const Args &in, Walk &w, u32 base, int walker, int tid) {
    const int lane = tid & 31, warp = tid >> 5, heads = in.heads;
    const float4 weight = *(const float4 *)(in.weight + 4 * lane);
    u32 number = 0;
    for (int item = walker; item < in.segment_count * heads; item += in.walkers) {
        const Segment s = in.segments[item / heads];
        const Chunks chunks = chunks_of(s);
        const int head = item % heads;
        const u64 first_row = s.first_row + chunks.first;
        // A thread's numbers of z come to places of its own, four rows at a time, a chunk ahead.
        const u32 places = base + GATE + (16 * warp * 32 + lane) * 16;
        const float *z = in.gates + (first_row + 16 * warp) * in.gates_stride + (heads + head) * DIM + 4 * lane;
        auto bring = [&](int chunk, int part) {
            if (chunk < chunks.count)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    copy_16(places + (4 * part + i) * 512, z + (u64)(CHUNK * chunk + 4 * part + i) * in.gates_stride);
            asm volatile("cp.async.commit_group;" ::: "memory");
        };
        for (int part = 0; part < 4; part++) bring(0, part);
        for (int chunk = 0; chunk < chunks.count; chunk++, number++) {
            const int first = chunks.first + CHUNK * chunk;
            float *to = in.out + (s.first_row + first + 16 * warp) * (u64)in.out_stride + head * DIM + 4 * lane;
            const u32 from = base + OUTPUT + (number & 1) * OUTPUT_BYTES + (lane >> 4) * 8192 + 16 * warp * 128 + (lane & 1) * 8;
            barrier_wait(shared_address(w.ready + (number & 1)), number >> 1 & 1);
#pragma unroll 1
            for (int part = 0; part < 4; part++) {
                float2 o[4][2];
                float square[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const u32 at = from + (4 * part + i) * 128 + ((((lane & 15) >> 1) ^ (4 * part + i & 7)) << 4);
                    o[i][0] = wide_halves(read_word(at));
                    o[i][1] = wide_halves(read_word(at + 4));
                    square[i] = fmaf(o[i][0].x, o[i][0].x, o[i][0].y * o[i][0].y) + fmaf(o[i][1].x, o[i][1].x, o[i][1].y * o[i][1].y);
                }
#pragma unroll
                for (int by = 16; by > 0; by >>= 1)
#pragma unroll
                    for (int i = 0; i < 4; i++) square[i] += __shfl_xor_sync(FULL, square[i], by);
                asm volatile("cp.async.wait_group 3;" ::: "memory");
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float scale = quick_inverse_root(square[i] * (1.0f / DIM) + in.eps);
                    const float2 z0 = read_two(places + (4 * part + i) * 512), z1 = read_two(places + (4 * part + i) * 512 + 8);
                    write_four(to + (u64)(4 * part + i) * in.out_stride,
                               make_float4(o[i][0].x * scale * weight.x * quick_sigmoid(z0.x), o[i][0].y * scale * weight.y * quick_sigmoid(z0.y),
                                           o[i][1].x * scale * weight.z * quick_sigmoid(z1.x), o[i][1].y * scale * weight.w * quick_sigmoid(z1.y)));
                }
                bring(chunk + 1, part);
            }
            barrier_arrive(shared_address(w.taken + (number & 1)));
            for (int r = max_of(0, (int)s.rows - in.ring.column_ring - first); r < CHUNK; r++) {
                const u64 entry = ((u64)s.slot * heads + head) * in.ring.column_ring + column_at(in.ring, s.position + first + r);
                const float *raw = in.proj + (u64)(s.first_row + first + r) * in.proj_stride + head * DIM;
                for (int j = tid; j < 3 * DIM; j += 128) in.ring.columns[entry * 3 * DIM + j] = raw[j / DIM * heads * DIM + j % DIM];
            }
        }
    }
}

// The state, transposed: values 64 group + 16 warp + g (+ 8), keys 8 n + 2 t, + 1.
//   V = U - W S;   o = q exp(G) S + P V;   S <- diag(exp(G_63)) S + (k exp(G_63 - G))^T V
// With S and V transposed, what a product leaves is the next one's operand in registers; only images are read from shared
// memory. S and V enter products as halves, sums are f32.
DEVICE void walk_chunks(const Args &in, Walk &w, u32 base, int walker, int tid) {
    const int lane = tid & 31, g = lane >> 2, t = lane & 3, group = tid >> 7, warp = (tid >> 5) & 3;
    // Rows 0 .. 7 at 16 bytes and the 16 bytes behind them, then rows 8 .. 15; turned.
    const u32 mine = ((lane & 7) + 8 * (lane >> 4)) * 128 + (((2 * warp + (lane >> 3 & 1)) ^ (lane & 7)) << 4);
    u32 number = 0;
#pragma unroll 1
    for (int item = walker; item < in.segment_count * in.heads; item += in.walkers) {
        const Segment s = in.segments[item / in.heads];
        const Chunks chunks = chunks_of(s);
        if (chunks.count == 0) continue;
        float *state = in.ring.state + ((u64)s.slot * in.heads + item % in.heads) * DIM * DIM + 64 * group + 16 * warp + g;
        const bool fresh = chunks.first == 0 && s.position == 0;
        float S[64];
#pragma unroll
        for (int n = 0; n < 16; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float *from = state + (8 * n + 2 * t + (i & 1)) * DIM + 8 * (i >> 1);
                S[4 * n + i] = fresh ? 0.0f : *from;
            }
        u32 left[8][4];
        float O[32], V[32];
#pragma unroll 1
        for (int chunk = 0; chunk < chunks.count; chunk++, number++) {
            const u32 stage = number % STAGES, now = base + stage * IMAGE_BYTES;
#pragma unroll
            for (int k = 0; k < 8; k++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float *pair = &S[4 * (2 * k + (i >> 1)) + 2 * (i & 1)];
                    left[k][i] = two_halves(pair[0], pair[1]);
                }
            barrier_wait(shared_address(w.full + stage), number / STAGES & 1);
            // The place may be filled again.
            if (tid == 0) store_flag(progress_of(in, walker), number + 1);
#pragma unroll
            for (int n = 0; n < 16; n++) {
                const float2 by = read_two(now + DECAY + (8 * n + 2 * t) * 4);
                float *to = &S[4 * n];
                to[0] *= by.x;
                to[1] *= by.y;
                to[2] *= by.x;
                to[3] *= by.y;
            }
#pragma unroll
            for (int n = 0; n < 8; n += 2) {
                u32 u[4];
                matrices_turned(u, now + UPDATE + PIECE * group + mine + 8 * n * 128);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float2 u2 = wide_halves(u[i]);
                    V[4 * (n + (i >> 1)) + 2 * (i & 1)] = u2.x;
                    V[4 * (n + (i >> 1)) + 2 * (i & 1) + 1] = u2.y;
                }
            }
            products_begin();
#pragma unroll
            for (int k = 0; k < 8; k++)
                Warpgroup<64>::multiply(V, left[k], describe(now + WEIGHT + (k >> 2) * PIECE) + 2 * (k & 3), 1);
            products_commit();
#pragma unroll
            for (int k = 0; k < 8; k++)
                Warpgroup<64>::multiply(O, left[k], describe(now + QUERY + (k >> 2) * PIECE) + 2 * (k & 3), k);
            products_commit();
            products_done<1>();
            hold(V);
            u32 values[4][4];
#pragma unroll
            for (int k = 0; k < 4; k++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float *pair = &V[4 * (2 * k + (i >> 1)) + 2 * (i & 1)];
                    values[k][i] = two_halves(pair[0], pair[1]);
                }
            products_begin();
#pragma unroll
            for (int k = 0; k < 4; k++) Warpgroup<128, 1>::multiply(S, values[k], describe_across(now + KEY + k * 2048, PIECE), 1);
            products_commit();
#pragma unroll
            for (int k = 0; k < 4; k++) Warpgroup<64>::multiply(O, values[k], describe(now + PAIRS) + 2 * k, 1);
            products_commit();
            products_done<0>();
            hold(S);
            hold(O);
            meet(1 + group, 128);
            if ((tid & 127) == 0) barrier_arrive(shared_address(w.empty + stage));
            if (number >= 2) barrier_wait(shared_address(w.taken + (number & 1)), (number >> 1 & 1) ^ 1);
#pragma unroll
            for (int n = 0; n < 8; n += 2) {
                u32 o[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float *pair = &O[4 * (n + (i >> 1)) + 2 * (i & 1)];
                    o[i] = two_halves(pair[0], pair[1]);
                }
                store_matrices_turned(base + OUTPUT + (number & 1) * OUTPUT_BYTES + 8192 * group + mine + 8 * n * 128, o);
            }
            barrier_arrive(shared_address(w.ready + (number & 1)));
        }
#pragma unroll
        for (int n = 0; n < 16; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) state[(8 * n + 2 * t + (i & 1)) * DIM + 8 * (i >> 1)] = S[4 * n + i];
    }
}
