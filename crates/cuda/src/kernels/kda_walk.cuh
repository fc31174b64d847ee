// The walk through the chunks of a head, from image to image: three roles of a block that meet at barriers in shared memory. One
// thread brings images, two warpgroups with 64 value columns each keep the state in their accumulators, one norms and gates.

#define STAGES 2
// Behind the stages: outputs of two chunks as halves, laid out as images are; the gate's numbers of one chunk in f32.
#define OUTPUT (STAGES * IMAGE_BYTES)
#define OUTPUT_BYTES 16384
#define GATE (OUTPUT + 2 * OUTPUT_BYTES)
// Warps that norm and gate, four rows at a time, and such groups that a warp has asked for.
#define GATERS 7
#define GATES 3

struct Walk {
    // Of the two parts of a stage: W and q, and all the rest.
    u64 full[2][STAGES], empty[2][STAGES], ready[2], taken[2];
};
DEVICE void walk_begin(Walk &w) {
    for (int i = 0; i < STAGES; i++) {
        for (int part = 0; part < 2; part++) {
            barrier_init(shared_address(w.full[part] + i), 1);
            barrier_init(shared_address(w.empty[part] + i), 8);
        }
    }
    for (int i = 0; i < 2; i++) {
        barrier_init(shared_address(w.ready + i), 256);
        barrier_init(shared_address(w.taken + i), CHUNK / 4);
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

// The block's number, read anew: a copy that all roles share is kept in memory by the compiler.
DEVICE int own_block() {
    int v;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(v));
    return v;
}

// Images of a walker's heads in turn; one thread.
DEVICE void fetch_images(const Args &in, Walk &w, u32 base, int walker) {
    u32 number = 0;
    // An image is here: its place in memory may be filled again. Nothing else that this thread did has to be seen.
    auto taken = [&](u32 of) {
#pragma unroll
        for (int part = 0; part < 2; part++) barrier_wait(shared_address(w.full[part] + of % STAGES), of / STAGES & 1);
        asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(progress_of(in, walker)), "r"(of + 1) : "memory");
    };
    for (int item = own_block(); item < in.segment_count * in.heads; item += in.walkers) {
        const int count = chunks_of(in.segments[item / in.heads]).count;
        for (int chunk = 0; chunk < count; chunk++, number++) {
            const u32 stage = number % STAGES;
            while (load_flag(flag_of(in, walker, number)) != number + 1) __nanosleep(40);
            copies_ordered();
#pragma unroll
            for (int part = 0; part < 2; part++) {
                const u32 full = shared_address(w.full[part] + stage), from = part ? KEY : 0, bytes = part ? IMAGE_BYTES - KEY : KEY;
                if (number >= STAGES) barrier_wait(shared_address(w.empty[part] + stage), (number / STAGES - 1) & 1);
                barrier_expect(full, bytes);
                copy_bulk(base + stage * IMAGE_BYTES + from, image_of(in, walker, number) + from, bytes, full);
            }
            if (number > 0) taken(number - 1);
        }
    }
    if (number > 0) taken(number - 1);
}

// out = o / rms(o) * weight * sigmoid(z); the segment's last raw columns to the ring. Four rows at a time, the warps in turn; a lane
// has four channels.
DEVICE void norm_outputs(const Args &in, Walk &w, u32 base, int walker, int tid) {
    const int lane = tid & 31, warp = tid >> 5, heads = in.heads;
    const float4 weight = *(const float4 *)(in.weight + 4 * lane);
    const u32 places = base + GATE + (warp * GATES * 4 * 32 + lane) * 16;
    u32 number = 0;
    for (int item = own_block(); item < in.segment_count * heads; item += in.walkers) {
        const Segment s = in.segments[item / heads];
        const Chunks chunks = chunks_of(s);
        const int head = item % heads, groups = CHUNK / 4 * chunks.count;
        const u64 first_row = s.first_row + chunks.first + 4 * warp;
        const float *z = in.gates + first_row * in.gates_stride + (heads + head) * DIM + 4 * lane;
        float *out = in.out + first_row * in.out_stride + head * DIM + 4 * lane;
        // A lane's numbers of z come to places of its own.
        u32 asked = warp, to = places;
        auto ask = [&]() {
            if (asked < groups) {
                const float *from = z;
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    copy_16(to + i * 512, from);
                    from += in.gates_stride;
                }
            }
            asm volatile("cp.async.commit_group;" ::: "memory");
            asked += GATERS;
            z += (u64)(4 * GATERS) * in.gates_stride;
            to = to == places + (GATES - 1) * 2048 ? places : to + 2048;
        };
#pragma unroll
        for (int i = 0; i < GATES; i++) ask();
        for (int group = warp; group < groups; group += GATERS) {
            const u32 now = number + group / (CHUNK / 4), part = group % (CHUNK / 4);
            const u32 from = base + OUTPUT + (now & 1) * OUTPUT_BYTES + (lane >> 4) * 8192 + 4 * part * 128 + (lane & 1) * 8;
            asm volatile("cp.async.wait_group %0;" ::"n"(GATES - 1) : "memory");
            float4 gate[4];
#pragma unroll
            for (int i = 0; i < 4; i++) gate[i] = read_floats(to + i * 512);
#pragma unroll
            for (int i = 0; i < 4; i++)
                gate[i] = make_float4(weight.x * quick_sigmoid(gate[i].x), weight.y * quick_sigmoid(gate[i].y),
                                      weight.z * quick_sigmoid(gate[i].z), weight.w * quick_sigmoid(gate[i].w));
            barrier_wait(shared_address(w.ready + (now & 1)), now >> 1 & 1);
            uint2 o[4];
            float square[4];
#pragma unroll
            for (int i = 0; i < 4; i++) o[i] = read_words(from + i * 128 + ((((lane & 15) >> 1) ^ (4 * (part & 1) + i)) << 4));
            __syncwarp();
            if (lane == 0) barrier_arrive(shared_address(w.taken + (now & 1)));
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float2 a = wide_halves(o[i].x), b = wide_halves(o[i].y);
                square[i] = fmaf(a.x, a.x, a.y * a.y) + fmaf(b.x, b.x, b.y * b.y);
                gate[i].x *= a.x;
                gate[i].y *= a.y;
                gate[i].z *= b.x;
                gate[i].w *= b.y;
            }
            // Lanes 8 i .. have the sum of row i.
            const bool high = lane & 16, odd = lane & 8;
            const float a = (high ? square[2] : square[0]) + __shfl_xor_sync(FULL, high ? square[0] : square[2], 16);
            const float b = (high ? square[3] : square[1]) + __shfl_xor_sync(FULL, high ? square[1] : square[3], 16);
            float sum = (odd ? b : a) + __shfl_xor_sync(FULL, odd ? a : b, 8);
#pragma unroll
            for (int by = 4; by > 0; by >>= 1) sum += __shfl_xor_sync(FULL, sum, by);
            const float own = quick_inverse_root(sum * (1.0f / DIM) + in.eps);
            float *row = out;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float scale = __shfl_sync(FULL, own, 8 * i);
                write_four(row, make_float4(gate[i].x * scale, gate[i].y * scale, gate[i].z * scale, gate[i].w * scale));
                row += in.out_stride;
            }
            out += (u64)(4 * GATERS) * in.out_stride;
            ask();
        }
        number += chunks.count;
        const int end = chunks.first + CHUNK * chunks.count;
#pragma unroll 1
        for (int r = max_of(chunks.first, (int)s.rows - in.ring.column_ring); r < end; r++) {
            const u64 entry = ((u64)s.slot * heads + head) * in.ring.column_ring + column_at(in.ring, s.position + r);
            const float *raw = in.proj + (u64)(s.first_row + r) * in.proj_stride + head * DIM;
#pragma unroll 1
            for (int j = tid; j < 3 * DIM; j += 32 * GATERS) in.ring.columns[entry * 3 * DIM + j] = raw[j / DIM * heads * DIM + j % DIM];
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
    for (int item = own_block(); item < in.segment_count * in.heads; item += in.walkers) {
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
        auto halves = [&]() {
#pragma unroll
            for (int k = 0; k < 8; k++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float *pair = &S[4 * (2 * k + (i >> 1)) + 2 * (i & 1)];
                    left[k][i] = two_halves(pair[0], pair[1]);
                }
        };
        halves();
        // Outputs of a chunk as halves, when their products are done.
        auto leave = [&](u32 of) {
            if (of >= 2) barrier_wait(shared_address(w.taken + (of & 1)), (of >> 1 & 1) ^ 1);
#pragma unroll
            for (int n = 0; n < 8; n += 2) {
                u32 o[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float *pair = &O[4 * (n + (i >> 1)) + 2 * (i & 1)];
                    o[i] = two_halves(pair[0], pair[1]);
                }
                store_matrices_turned(base + OUTPUT + (of & 1) * OUTPUT_BYTES + 8192 * group + mine + 8 * n * 128, o);
            }
            barrier_arrive(shared_address(w.ready + (of & 1)));
        };
#pragma unroll 1
        for (int chunk = 0; chunk < chunks.count; chunk++, number++) {
            const u32 stage = number % STAGES, now = base + stage * IMAGE_BYTES;
            barrier_wait(shared_address(w.full[0] + stage), number / STAGES & 1);
            products_begin();
#pragma unroll
            for (int k = 0; k < 8; k++)
                Warpgroup<64>::multiply(V, left[k], describe(now + WEIGHT + (k >> 2) * PIECE) + 2 * (k & 3), k);
            products_commit();
            // While these run: outputs of the chunk before, the state's decay, updates.
            products_done<1>();
            hold(O);
            hold(S);
            if (chunk > 0) leave(number - 1);
            barrier_wait(shared_address(w.full[1] + stage), number / STAGES & 1);
            products_begin();
#pragma unroll
            for (int k = 0; k < 8; k++)
                Warpgroup<64>::multiply(O, left[k], describe(now + QUERY + (k >> 2) * PIECE) + 2 * (k & 3), k);
            products_commit();
#pragma unroll
            for (int n = 0; n < 16; n++) {
                const float2 by = read_two(now + DECAY + (8 * n + 2 * t) * 4);
                float *to = &S[4 * n];
                to[0] *= by.x;
                to[1] *= by.y;
                to[2] *= by.x;
                to[3] *= by.y;
            }
            u32 values[4][4];
#pragma unroll
            for (int k = 0; k < 4; k++) matrices_turned(values[k], now + UPDATE + PIECE * group + mine + 16 * k * 128);
            products_done<1>();
            hold(V);
#pragma unroll
            for (int k = 0; k < 4; k++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float *pair = &V[4 * (2 * k + (i >> 1)) + 2 * (i & 1)];
                    const float2 u = wide_halves(values[k][i]);
                    values[k][i] = two_halves(u.x + pair[0], u.y + pair[1]);
                }
            products_begin();
#pragma unroll
            for (int k = 0; k < 4; k++) Warpgroup<128, 1>::multiply(S, values[k], describe_across(now + KEY + k * 2048, PIECE), 1);
            products_commit();
#pragma unroll
            for (int k = 0; k < 4; k++) Warpgroup<64>::multiply(O, values[k], describe(now + PAIRS) + 2 * k, 1);
            products_commit();
            products_done<2>();
            if (lane == 0) barrier_arrive(shared_address(w.empty[0] + stage));
            products_done<0>();
            hold(S);
            hold(O);
            if (lane == 0) barrier_arrive(shared_address(w.empty[1] + stage));
            halves();
        }
        leave(number - 1);
#pragma unroll
        for (int n = 0; n < 16; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) state[(8 * n + 2 * t + (i & 1)) * DIM + 8 * (i >> 1)] = S[4 * n + i];
    }
}
