// Tokens from rows of logits without bringing the rows to the host.
//
// The largest logit of a row: a row is cut into parts, a block each; the last block of a row to end takes the best of the parts.
// A pair of key and token is one number: the key grows with the logit, equal logits have equal keys (both zeros too), and among
// those the lower token makes the larger number. What is not a number has the largest key of all, so it cannot get lost.
//
// Rules change logits as they are read: a mask says which tokens exist, changes name single tokens. A part holds a bit for each of
// its tokens: those that are read plainly. Tokens with a change are taken one by one.
#include "common.cuh"

#define THREADS 256
// Tokens of a part at most.
#define PART 40960
// The row is for somebody else to look at: not a number, infinite, or nothing to choose from.
#define NONE 0xffffffffu

// A row's rule as uploaded: the row, its changes, the first word of its mask or NONE.
struct Rule {
    u32 row, first, count, mask;
};

// One token's change: l + bias, then divided by `repetition` if above zero and else multiplied by it, then less `minus`.
struct Change {
    u32 token;
    float bias, repetition, minus;
};

DEVICE u32 key_of(float x) {
    if (x != x) return NONE;
    const u32 bits = __float_as_uint(x + 0.0f);
    return (int)bits < 0 ? ~bits : bits | 0x80000000u;
}

DEVICE u64 candidate(float x, u32 token) { return (u64)key_of(x) << 32 | (u32)~token; }

DEVICE u64 better(u64 a, u64 b) { return a > b ? a : b; }

// The best of a block, in its first thread. `room` holds THREADS / 32 pairs.
DEVICE u64 best_of_block(u64 best, u64 *room) {
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) best = better(best, __shfl_xor_sync(FULL, best, d));
    if ((threadIdx.x & 31) == 0) room[threadIdx.x >> 5] = best;
    __syncthreads();
    if (threadIdx.x < 32) {
        best = threadIdx.x < THREADS / 32 ? room[threadIdx.x] : 0;
#pragma unroll
        for (int d = THREADS / 64; d > 0; d >>= 1) best = better(best, __shfl_xor_sync(FULL, best, d));
    }
    return best;
}

DEVICE float changed(float x, const Change &c) {
    x = __fadd_rn(x, c.bias);
    x = x > 0.0f ? __fdiv_rn(x, c.repetition) : __fmul_rn(x, c.repetition);
    return __fsub_rn(x, c.minus);
}

// The largest of a thread's logits so far. `most` is below everything at first; once it is not a number it stays so.
struct Largest {
    float most;
    u32 at;

    __device__ __forceinline__ void take(float x, u32 token) {
        if (!(x <= most)) {
            at = most != most ? at : token;
            most = most != most ? most : x;
        }
    }

    __device__ __forceinline__ void take(float4 v, u32 token) {
        float m;
        asm("{\n.reg .f32 a, b;\nmax.NaN.f32 a, %1, %2;\nmax.NaN.f32 b, %3, %4;\nmax.NaN.f32 %0, a, b;\n}"
            : "=f"(m)
            : "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w));
        if (!(m <= most)) {
            take(v.x, token);
            take(v.y, token + 1);
            take(v.z, token + 2);
            take(v.w, token + 3);
        }
    }
};

// What bits leave of four logits: the others are below everything, unless they are not numbers.
DEVICE float kept(float x, u32 bits, int i) { return bits >> i & 1 || x != x ? x : -INFINITY; }

// The token of the largest logit of each rule's row (of each row without rules), NONE where that is for somebody else to say.
// `part` tokens, a multiple of 128, are a block's. `parts` has a pair for each block; `ended` is zero for each row before and
// after.
extern "C" __global__ void __launch_bounds__(THREADS) largest(const float *logits, int width, int vocabulary, int part,
                                                              const Rule *rules, const Change *changes, const u32 *masks,
                                                              u64 *parts, u32 *ended, u32 *tokens) {
    __shared__ u32 plain[PART / 32];
    __shared__ u64 room[THREADS / 32];
    __shared__ u32 last;
    after_previous();
    let_next_begin();
    const int thread = threadIdx.x, item = blockIdx.y, count = gridDim.x;
    const int first = blockIdx.x * part, end = min_of(first + part, vocabulary);
    Rule rule = {(u32)item, 0, 0, NONE};
    if (rules) rule = rules[item];
    const float *row = logits + (u64)rule.row * width;
    const bool ruled = rule.count > 0 || rule.mask != NONE;

    u64 best = 0;
    if (ruled) {
        for (int w = thread; w < part / 32; w += THREADS) {
            const int word = first / 32 + w;
            plain[w] = word * 32 >= vocabulary ? 0 : rule.mask == NONE ? FULL : masks[rule.mask + word];
        }
        __syncthreads();
        for (u32 i = thread; i < rule.count; i += THREADS) {
            const Change change = changes[rule.first + i];
            const u32 place = change.token - first;
            if (change.token < first || change.token >= end) continue;
            const float x = row[change.token];
            const u32 bit = 1u << place % 32;
            // No token has two changes, so nobody else clears this bit.
            if (atomicAnd(&plain[place / 32], ~bit) & bit || x != x) best = better(best, candidate(changed(x, change), change.token));
        }
        __syncthreads();
    }

    Largest most = {-INFINITY, 0};
    if (width % 4 == 0) {
        constexpr int AHEAD = 4;
        const int whole = end & ~3;
        for (int at = first + 4 * thread; at < whole; at += 4 * THREADS * AHEAD) {
            uint4 loaded[AHEAD];
#pragma unroll
            for (int j = 0; j < AHEAD; j++) {
                const int token = at + 4 * THREADS * j;
                loaded[j] = make_uint4(0xff800000u, 0xff800000u, 0xff800000u, 0xff800000u);
                if (token < whole) loaded[j] = load_stream(row + token);
            }
#pragma unroll
            for (int j = 0; j < AHEAD; j++) {
                const int token = at + 4 * THREADS * j;
                float4 v = make_float4(__uint_as_float(loaded[j].x), __uint_as_float(loaded[j].y),
                                       __uint_as_float(loaded[j].z), __uint_as_float(loaded[j].w));
                if (ruled && token < whole) {
                    const u32 bits = plain[(token - first) / 32] >> (token & 31);
                    v = make_float4(kept(v.x, bits, 0), kept(v.y, bits, 1), kept(v.z, bits, 2), kept(v.w, bits, 3));
                }
                most.take(v, token);
            }
        }
        // What is left of the row: up to three tokens of its last part.
        const int token = whole + thread;
        if (token < end) most.take(ruled ? kept(row[token], plain[(token - first) / 32] >> (token & 31), 0) : row[token], token);
    } else {
        for (int token = first + thread; token < end; token += THREADS)
            most.take(ruled ? kept(row[token], plain[(token - first) / 32] >> (token & 31), 0) : row[token], token);
    }
    best = best_of_block(better(best, candidate(most.most, most.at)), room);

    if (thread == 0) {
        parts[(u64)item * count + blockIdx.x] = best;
        __threadfence();
        last = atomicInc(&ended[item], count - 1) == count - 1;
    }
    __syncthreads();
    if (!last || thread >= 32) return;
    __threadfence();
    best = 0;
    for (int i = thread; i < count; i += 32) best = better(best, __ldcg(&parts[(u64)item * count + i]));
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) best = better(best, __shfl_xor_sync(FULL, best, d));
    const u32 key = best >> 32;
    const u32 infinite = 0xff800000u, nothing = 0x007fffffu;
    if (thread == 0) tokens[item] = key < infinite && key > nothing ? ~(u32)best : NONE;
}

// Tokens of a step's rows: those kept for other rows, token 0 where there is none.
KERNEL take_tokens(const u32 *kept, const u32 *rows, int count, u32 *tokens) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    after_previous();
    let_next_begin();
    if (i >= count) return;
    const u32 token = kept[rows[i]];
    tokens[i] = token == FULL ? 0 : token;
}
