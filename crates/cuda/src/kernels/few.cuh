// What the products of few rows with BF16 weights share (few.cu, experts_bf16.cu; compute capability 9.0): the cluster, a warp's
// ring of weights, operands of the tensor core.
//
// A slice is 512 columns, a tile 16 rows; each of eight warps has 64 columns of the slice and a ring of its own, 2048 bytes a stage,
// in which odd rows have their halves exchanged, so that reading meets all banks. PLANES and STAGES are the kernels' constants.
#define WARPS 8
#define THREADS 256
#define SLICE 512
#define STAGE_BYTES 16384

DEVICE u32 cluster_rank() {
    u32 r;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}
DEVICE void cluster_meet() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
DEVICE u32 peer(u32 address, u32 rank) {
    u32 a;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(a) : "r"(address), "r"(rank));
    return a;
}
DEVICE void peer_store(u32 address, float v) { asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory"); }
DEVICE void peer_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
DEVICE void cluster_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n@done bra over;\n"
        "bra again;\nover:\n}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
}
DEVICE uint4 shared_words(u32 address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
    return v;
}

// Weights are read once.
DEVICE u64 read_once() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// Where this lane's copies go: a row's 16-byte piece lane % 8 of the warp's 128 bytes, of the rows lane / 8, + 4, + 8, + 12.
DEVICE u32 copies_to(u32 ring) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, quarter = lane >> 3;
    return ring + warp * 2048 + quarter * 128 + (((lane & 7) ^ (4 * (quarter & 1))) << 4);
}

// This lane's copies of a tile; `row` gives the address of a row.
template <class Row>
DEVICE void copy_tile(u32 to, u32 column, u64 policy, Row row) {
    const int lane = threadIdx.x & 31;
    column += (threadIdx.x >> 5) * 128 + 16 * (lane & 7);
#pragma unroll
    for (int r = 0; r < 4; r++) {
        const u8 *from = row((lane >> 3) + 4 * r) + column;
        asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to + r * 512), "l"(from), "l"(policy)
                     : "memory");
    }
}

// Where this lane's weights of a tile are: 32 k + 8 t .. + 7 of the rows g and g + 8.
DEVICE u32 weights_at(u32 ring) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    return ring + warp * 2048 + g * 128 + ((t ^ (4 * (g & 1))) << 4);
}

// Reads them when the copies that were asked for STAGES - 2 groups ago are there.
DEVICE void take_tile(uint4 (&a)[2][2], u32 own, u32 slot) {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
    __syncwarp();
#pragma unroll
    for (int k = 0; k < 2; k++)
#pragma unroll
        for (int r = 0; r < 2; r++) a[k][r] = shared_words((own ^ (k << 6)) + slot * STAGE_BYTES + r * 1024);
    __syncwarp();
}

// Four columns of a row as planes.
DEVICE void split(u32 (&b)[PLANES][4], int at, float4 w) {
    const u32 high = narrow(w.x, w.y), next = narrow(w.z, w.w);
    b[0][at] = high, b[0][at + 1] = next;
#if PLANES > 1
    b[1][at] = narrow(w.x - widen_low(high), w.y - widen_high(high));
    b[1][at + 1] = narrow(w.z - widen_low(next), w.w - widen_high(next));
#endif
}

// Four sums of a tile by a lane.
DEVICE void store_sums(u32 to, const float (&c)[4]) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]) : "memory");
}

// What all warps of the block have of a sum, `apart` floats from each other.
DEVICE float sum_of_warps(const float *r, int apart) {
    float s = r[0];
#pragma unroll
    for (int w = 1; w < WARPS; w++) s += r[w * apart];
    return s;
}
