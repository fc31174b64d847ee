// Kimi delta attention in four kernels: rows prepared for the delta rule (convolution, norms, gates), the rule itself over
// tiles of 32 value columns held in registers, the gated norm, and the convolution ring.
//
// A slot's layer holds per head: state [DIM, DIM], records [RECORDS, 3, DIM] (key, decay, update), columns [COLUMNS, 3, DIM].
// The state includes the first `commit` rows of a segment; the others leave records, which a later step folds in by the
// same operations in the same order, so that folding gives the bits that the rule had.
// DIM: width of a head (a multiple of 32, at most 128); TAPS: taps of the convolution.
#include "common.cuh"

#define VALUES 32
#define KEYS (DIM / 4)

struct Ring {
    float *state, *records, *columns;
    int record_ring, column_ring;
};

// Sum over the DIM threads of a block.
DEVICE float dim_sum(float v, float *room) { return block_sum<DIM>(v, room); }

DEVICE float column_at(const Ring ring, u64 unit, int position, int part, int d) {
    return ring.columns[((unit * ring.column_ring + position % ring.column_ring) * 3 + part) * DIM + d];
}

// Grid (rows, heads), DIM threads. ready: [rows, heads, 4, DIM] = q, k, v, decay; beta [rows, heads].
KERNEL prepare(const Segment *segments, const u32 *row_segment, const float *proj, int proj_stride, const float *gates,
               int gates_stride, const u8 *taps, int bf16, int taps_pitch, const float *a_log, const float *dt_bias,
               float bound, const __grid_constant__ Ring ring, int heads, float *ready, float *beta) {
    __shared__ float room[DIM / 32];
    const int row = blockIdx.x, head = blockIdx.y, d = threadIdx.x, inner = heads * DIM;
    const Segment s = segments[row_segment[row]];
    const int position = s.position + row - s.first_row;
    const u64 unit = (u64)s.slot * heads + head;
    float v[3];
#pragma unroll
    for (int part = 0; part < 3; part++) {
        const int channel = part * inner + head * DIM + d;
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < TAPS; j++) {
            const int p = position - (TAPS - 1) + j;
            float x = 0.0f;
            if (p >= (int)s.position) x = proj[(u64)(s.first_row + p - s.position) * proj_stride + channel];
            else if (p >= 0) x = column_at(ring, unit, p, part, d);
            const u64 at = (u64)channel * taps_pitch + j;
            const float w = bf16 ? widen(((const u16 *)taps)[at]) : ((const float *)taps)[at];
            sum = j == 0 ? w * x : fmaf(w, x, sum);
        }
        v[part] = silu(sum);
    }
    const float factor = 1.0f / sqrtf((float)DIM);
    const float q = v[0] * (factor / sqrtf(dim_sum(v[0] * v[0], room) + 1e-6f));
    const float k = v[1] * (1.0f / sqrtf(dim_sum(v[1] * v[1], room) + 1e-6f));
    const float f = gates[(u64)row * gates_stride + head * DIM + d];
    const float g = bound * sigmoid(expf(a_log[head]) * (f + dt_bias[head * DIM + d]));
    float *to = ready + ((u64)row * heads + head) * 4 * DIM + d;
    to[0] = q;
    to[DIM] = k;
    to[2 * DIM] = v[2];
    to[3 * DIM] = expf(g);
    if (d == 0) beta[(u64)row * heads + head] = sigmoid(proj[(u64)row * proj_stride + 3 * inner + head]);
}

// Grid (DIM / VALUES, heads, segments), 128 threads. Thread (c, r) = (tid / 4, tid % 4) owns value column c of the tile and
// the keys 16 i + 4 r + j.
KERNEL delta(const Segment *segments, const float *ready, const float *beta, const __grid_constant__ Ring ring, int heads,
             float *out, int out_stride) {
    __shared__ __align__(16) float rows[2][3 * DIM + VALUES + 4];
    const Segment s = segments[blockIdx.z];
    const int head = blockIdx.y, first = blockIdx.x * VALUES, c = threadIdx.x >> 2, r = threadIdx.x & 3;
    const u64 unit = (u64)s.slot * heads + head;
    float *state = ring.state + unit * DIM * DIM + first + c;
    float S[KEYS];
    const bool fresh = s.position == s.fold;
#pragma unroll
    for (int i = 0; i < KEYS; i++) {
        const int key = 16 * (i >> 2) + 4 * r + (i & 3);
        S[i] = fresh ? 0.0f : state[key * DIM];
    }
    for (u32 p = s.position - s.fold; p < s.position; p++) {
        const float *record = ring.records + (unit * ring.record_ring + p % ring.record_ring) * 3 * DIM;
        const float u = record[2 * DIM + first + c];
#pragma unroll
        for (int i = 0; i < KEYS; i++) {
            const int key = 16 * (i >> 2) + 4 * r + (i & 3);
            S[i] = fmaf(record[key], u, S[i] * record[DIM + key]);
        }
    }
    if (s.commit == 0) {
        // The folded rows are committed even when no row of this step is.
#pragma unroll
        for (int i = 0; i < KEYS; i++) state[(16 * (i >> 2) + 4 * r + (i & 3)) * DIM] = S[i];
    }

    const int tid = threadIdx.x;
    float next[3], next_v = 0.0f;
    auto fetch = [&](int t) {
        const u64 row = (u64)(s.first_row + t) * heads + head;
        const float *from = ready + row * 4 * DIM;
        if (tid < DIM) {
            next[0] = from[tid];
            next[1] = from[DIM + tid];
            next[2] = from[3 * DIM + tid];
        }
        if (tid < VALUES) next_v = from[2 * DIM + first + tid];
        else if (tid == VALUES) next_v = beta[row];
    };
    auto put = [&](int side) {
        if (tid < DIM) {
            rows[side][tid] = next[0];
            rows[side][DIM + tid] = next[1];
            rows[side][2 * DIM + tid] = next[2];
        }
        if (tid <= VALUES) rows[side][3 * DIM + tid] = next_v;
    };
    fetch(0);
    put(0);
    __syncthreads();
    for (int t = 0; t < (int)s.rows; t++) {
        const float *now = rows[t & 1];
        if (t + 1 < (int)s.rows) fetch(t + 1);
        float seen = 0.0f;
#pragma unroll
        for (int i = 0; i < KEYS; i += 4) {
            const float4 k = *(const float4 *)(now + DIM + 4 * i + 4 * r);
            const float4 e = *(const float4 *)(now + 2 * DIM + 4 * i + 4 * r);
            S[i] *= e.x;
            S[i + 1] *= e.y;
            S[i + 2] *= e.z;
            S[i + 3] *= e.w;
            seen = fmaf(S[i], k.x, seen);
            seen = fmaf(S[i + 1], k.y, seen);
            seen = fmaf(S[i + 2], k.z, seen);
            seen = fmaf(S[i + 3], k.w, seen);
        }
        seen += __shfl_xor_sync(FULL, seen, 1);
        seen += __shfl_xor_sync(FULL, seen, 2);
        const float u = now[3 * DIM + VALUES] * (now[3 * DIM + c] - seen);
        float o = 0.0f;
#pragma unroll
        for (int i = 0; i < KEYS; i += 4) {
            const float4 k = *(const float4 *)(now + DIM + 4 * i + 4 * r);
            const float4 q = *(const float4 *)(now + 4 * i + 4 * r);
            S[i] = fmaf(k.x, u, S[i]);
            S[i + 1] = fmaf(k.y, u, S[i + 1]);
            S[i + 2] = fmaf(k.z, u, S[i + 2]);
            S[i + 3] = fmaf(k.w, u, S[i + 3]);
            o = fmaf(S[i], q.x, o);
            o = fmaf(S[i + 1], q.y, o);
            o = fmaf(S[i + 2], q.z, o);
            o = fmaf(S[i + 3], q.w, o);
        }
        o += __shfl_xor_sync(FULL, o, 1);
        o += __shfl_xor_sync(FULL, o, 2);
        if (r == 0) out[(u64)(s.first_row + t) * out_stride + head * DIM + first + c] = o;
        if (t + 1 == (int)s.commit) {
#pragma unroll
            for (int i = 0; i < KEYS; i++) state[(16 * (i >> 2) + 4 * r + (i & 3)) * DIM] = S[i];
        }
        if (t >= (int)s.commit) {
            float *record = ring.records + (unit * ring.record_ring + (s.position + t) % ring.record_ring) * 3 * DIM;
            if (r == 0) record[2 * DIM + first + c] = u;
            if (blockIdx.x == 0 && tid < DIM) {
                record[tid] = now[DIM + tid];
                record[DIM + tid] = now[2 * DIM + tid];
            }
        }
        if (t + 1 < (int)s.rows) put((t + 1) & 1);
        __syncthreads();
    }
}

// out = o / rms(o) * weight * sigmoid(z), in place. Grid (rows, heads), DIM threads.
KERNEL gate(float *out, int out_stride, const float *gates, int gates_stride, const float *weight, float eps, int heads) {
    __shared__ float room[DIM / 32];
    const int row = blockIdx.x, head = blockIdx.y, d = threadIdx.x;
    float *to = out + (u64)row * out_stride + head * DIM + d;
    const float o = *to;
    const float scale = 1.0f / sqrtf(dim_sum(o * o, room) / DIM + eps);
    const float z = gates[(u64)row * gates_stride + heads * DIM + head * DIM + d];
    *to = o * scale * weight[d] * sigmoid(z);
}

// Raw q, k, v of a segment's last rows to the ring. Grid (column_ring, heads, segments), DIM threads.
KERNEL remember(const Segment *segments, const float *proj, int proj_stride, const __grid_constant__ Ring ring, int heads) {
    const Segment s = segments[blockIdx.z];
    const int keep = min_of(s.rows, ring.column_ring), head = blockIdx.y, d = threadIdx.x;
    if ((int)blockIdx.x >= keep) return;
    const int t = s.rows - keep + blockIdx.x;
    const u64 unit = (u64)s.slot * heads + head;
    const float *from = proj + (u64)(s.first_row + t) * proj_stride + head * DIM + d;
    float *to = ring.columns + (unit * ring.column_ring + (s.position + t) % ring.column_ring) * 3 * DIM + d;
#pragma unroll
    for (int part = 0; part < 3; part++) to[part * DIM] = from[part * heads * DIM];
}
