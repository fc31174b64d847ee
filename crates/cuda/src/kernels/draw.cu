// Tokens drawn from rows of logits: temperature, min-p, top-k, top-p, without sorting a row and without bringing it to the host.
//
// A cluster of eight blocks holds a row in shared memory, so that it comes from memory once. Tokens are counted in bins of 1/64 of
// the temperature below the largest logit; a bin's count and the sum of its tokens' places in it bound its mass to 2e-4. From the
// bins follow a window, which holds the end of the set that is drawn from, and a limit, above which tokens are listed. Listed
// tokens weigh in f64 as on the host, the others in f32; the window's are sorted. A draw goes by token: through the sums of 128
// segments, then through one segment.
//
// What a sum can be wrong by is known. Where the end of the set or the draw comes closer to the next token than that, or the
// window or a list is too full, the row is left to the host: a token that is given is the host's.
#include "common.cuh"

#define THREADS 512
#define WARPS 16
#define BLOCKS 8
#define SEGMENTS (BLOCKS * WARPS)
#define BINS 2048
#define WINDOW 1024
// Listed tokens of a warp, and of a row.
#define LISTED 256
#define LIMIT 16384
#define NONE 0xffffffffu

// A row's rule as uploaded: see sampler.cu.
struct Rule {
    u32 row, first, count, mask;
};
struct Change {
    u32 token;
    float bias, repetition, minus;
};
// How a row is drawn: one over the temperature, the lowest logit below the best (minus infinity: any), the mass that is kept, a
// number in [0, 1), how many tokens are kept (0: all).
struct Draw {
    double steepness, floor, top_p, uniform;
    u32 top_k, spare;
};

struct Shared {
    u32 bins[2][BINS];
    u64 window[WINDOW];
    // A warp's segment: what is kept above the window and inside it, what is not listed, what is.
    double kept[WARPS], added[WARPS], rest[WARPS], all[WARPS];
    double room[WARPS];
    double ahead;
    u32 count_room[WARPS];
    float largest;
    u32 overrun, overfull, windowed;
    int low, high, limit, end, at;
    u32 before;
    u64 least;
    unsigned short listed[WARPS][LISTED];
    __align__(16) float row[4];
};
static_assert(sizeof(Shared) == HEAD + 16, "the launcher knows what lies before the row");

DEVICE void cluster_meet() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
DEVICE u32 peer(const void *p, int rank) {
    u32 address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"((u32)__cvta_generic_to_shared(p)), "r"(rank));
    return address;
}
DEVICE u32 peer_word(const void *p, int rank) {
    u32 v;
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(v) : "r"(peer(p, rank)) : "memory");
    return v;
}
DEVICE uint4 peer_words(const void *p, int rank) {
    uint4 v;
    asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(peer(p, rank))
                 : "memory");
    return v;
}
DEVICE u64 peer_long(const void *p, int rank) {
    u64 v;
    asm volatile("ld.shared::cluster.u64 %0, [%1];" : "=l"(v) : "r"(peer(p, rank)) : "memory");
    return v;
}
DEVICE double peer_double(const void *p, int rank) { return __longlong_as_double(peer_long(p, rank)); }

DEVICE float changed(float x, const Change &c) {
    x = __fadd_rn(x, c.bias);
    x = x > 0.0f ? __fdiv_rn(x, c.repetition) : __fmul_rn(x, c.repetition);
    return __fsub_rn(x, c.minus);
}

// Grows with the logit and falls with the token.
DEVICE u64 rank_of(float x, u32 token) {
    const u32 bits = __float_as_uint(x + 0.0f);
    return (u64)((int)bits < 0 ? ~bits : bits | 0x80000000u) << 32 | (u32)~token;
}
DEVICE float logit_of(u64 rank) {
    const u32 key = rank >> 32;
    return __uint_as_float((int)key < 0 ? key & 0x7fffffffu : ~key);
}

// e^x for x up to 0, to 1e-15 of its value.
DEVICE double exponential(double x) {
    x = x > -708.0 ? x : -708.0;
    const double round = 6755399441055744.0;
    const double shifted = fma(x, 1.4426950408889634, round);
    const double n = shifted - round;
    double r = fma(n, -0.6931471803691238, x);
    r = fma(n, -1.9082149292705877e-10, r);
    double p = 1.0 / 479001600.0;
    p = fma(p, r, 1.0 / 39916800.0);
    p = fma(p, r, 1.0 / 3628800.0);
    p = fma(p, r, 1.0 / 362880.0);
    p = fma(p, r, 1.0 / 40320.0);
    p = fma(p, r, 1.0 / 5040.0);
    p = fma(p, r, 1.0 / 720.0);
    p = fma(p, r, 1.0 / 120.0);
    p = fma(p, r, 1.0 / 24.0);
    p = fma(p, r, 1.0 / 6.0);
    p = fma(p, r, 0.5);
    p = fma(p, r, 1.0);
    p = fma(p, r, 1.0);
    return p * __longlong_as_double((__double_as_longlong(shifted) + 1023) << 52);
}

DEVICE double warp_total(double v) {
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) v += __shfl_xor_sync(FULL, v, d);
    return v;
}

// The sum of the values of all threads before this one; `total` is that of all. `room` holds WARPS numbers and is free after.
template <typename T>
DEVICE T before_thread(T v, T *room, T &total) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    T sum = v;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
        const T other = __shfl_up_sync(FULL, sum, d);
        if (lane >= d) sum += other;
    }
    if (lane == 31) room[warp] = sum;
    __syncthreads();
    T before = 0;
    total = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        const T part = room[w];
        if (w < warp) before += part;
        total += part;
    }
    __syncthreads();
    return before + sum - v;
}

DEVICE float most(float a, float b) {
    float m;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(m) : "f"(a), "f"(b));
    return m;
}

// The token of each rule's row, NONE where the host has to look. `part` tokens, a multiple of 32, are a block's, `segment` of them,
// also one, a warp's.
extern "C" __global__ void __launch_bounds__(THREADS, 2) draw(const float *logits, int width, int vocabulary, int part,
                                                              int segment, const Rule *rules, const Draw *draws,
                                                              const Change *changes, const u32 *masks, u32 *tokens) {
    extern __shared__ __align__(16) unsigned char memory[];
    Shared &s = *(Shared *)memory;
    after_previous();
    const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
    const int item = blockIdx.x / BLOCKS, rank = blockIdx.x % BLOCKS;
    const Rule rule = rules[item];
    const Draw &how = draws[item];
    const int first = min_of(rank * part, vocabulary), count = min_of(part, vocabulary - first);
    const int begin = min_of(warp * segment, count), end = min_of(begin + segment, count);
    const float *from = logits + (u64)rule.row * width + first;

    // The row, and its largest logit.
    for (int i = thread; i < 2 * BINS; i += THREADS) s.bins[0][i] = 0;
    if (thread == 0) {
        s.overrun = s.overfull = s.windowed = 0;
        s.largest = -INFINITY;
        s.low = s.high = s.limit = s.end = s.at = -1;
        s.before = 0;
        s.least = 0;
        if (rank == 0) tokens[item] = NONE;
    }
    if (thread < WARPS) s.added[thread] = 0.0;
    float best = -INFINITY;
    if (width % 4 == 0) {
        constexpr int AHEAD = 5;
        for (int at = begin + 4 * lane; at < end; at += 128 * AHEAD) {
            uint4 v[AHEAD];
#pragma unroll
            for (int j = 0; j < AHEAD; j++)
                if (at + 128 * j < end) v[j] = load_stream(from + at + 128 * j);
#pragma unroll
            for (int j = 0; j < AHEAD; j++) {
                const int i = at + 128 * j;
                if (i >= end) break;
                float x[4] = {__uint_as_float(v[j].x), __uint_as_float(v[j].y), __uint_as_float(v[j].z), __uint_as_float(v[j].w)};
                const u32 bits = rule.mask == NONE ? FULL : masks[rule.mask + (first + i) / 32] >> ((first + i) & 31);
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    if (i + e >= end) x[e] = -INFINITY;
                    if (!(bits >> e & 1) && x[e] == x[e]) x[e] = -INFINITY;
                    best = most(best, x[e]);
                }
                *(float4 *)(s.row + i) = make_float4(x[0], x[1], x[2], x[3]);
            }
        }
    } else {
        for (int i = begin + lane; i < end; i += 32) {
            float x = from[i];
            if (rule.mask != NONE && !(masks[rule.mask + (first + i) / 32] >> ((first + i) & 31) & 1) && x == x) x = -INFINITY;
            best = most(best, x);
            s.row[i] = x;
        }
    }
    let_next_begin();
    __syncthreads();
    if (rule.count > 0) {
        for (u32 i = thread; i < rule.count; i += THREADS) {
            const Change change = changes[rule.first + i];
            const u32 place = change.token - first;
            if (place < (u32)count) s.row[place] = changed(s.row[place], change);
        }
        __syncthreads();
        best = best != best ? best : -INFINITY;
        for (int i = begin + lane; i < end; i += 32) best = most(best, s.row[i]);
    }
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) best = most(best, __shfl_xor_sync(FULL, best, d));
    if (lane == 0) s.room[warp] = best;
    __syncthreads();
    if (thread == 0)
        for (int w = 0; w < WARPS; w++) s.largest = most(s.largest, (float)s.room[w]);
    cluster_meet();
    best = -INFINITY;
    for (int b = 0; b < BLOCKS; b++) best = most(best, __uint_as_float(peer_word(&s.largest, b)));
    if (!(best > -INFINITY && best < INFINITY)) {
        cluster_meet();
        return;
    }

    // Counts in bins: 1 in the upper half of a word, the place in the bin in 64ths in the lower.
    const float floor = __double2float_ru(how.floor == -(double)INFINITY ? -1.7e308 : __dadd_rn((double)best, how.floor));
    const float bins = (float)(64.0 * how.steepness), powers = (float)(-1.4426950408889634 * how.steepness);
    u32 binned = 0;
    for (int i = begin + lane; i < end; i += 32) {
        const float x = s.row[i];
        const float y = (best - x) * bins;
        if (x >= floor && y < (float)BINS) {
            const int bin = (int)y;
            atomicAdd(&s.bins[warp & 1][bin], 0x10000u + (u32)((y - (float)bin) * 64.0f));
            binned++;
        }
    }
    u32 total_binned;
    before_thread(binned, s.count_room, total_binned);
    {
        u32 a[4], b[4], counted = 0;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            a[j] = s.bins[0][4 * thread + j];
            b[j] = s.bins[1][4 * thread + j];
            s.bins[0][4 * thread + j] = (a[j] >> 16) + (b[j] >> 16);
            s.bins[1][4 * thread + j] = (a[j] & 0xffffu) + (b[j] & 0xffffu);
            counted += (a[j] >> 16) + (b[j] >> 16);
        }
        u32 total_counted;
        before_thread(counted, s.count_room, total_counted);
        // A lower half that ran over has counted one more.
        if (thread == 0 && total_counted != total_binned) s.overrun = 1;
    }
    cluster_meet();

    // Counts and masses of all before each bin; the window and the limit.
    u32 bad = 0;
    for (int b = 0; b < BLOCKS; b++) bad |= peer_word(&s.overrun, b);
    const bool by_rank = how.top_k > 0, by_mass = how.top_p < 1.0, narrowed = by_rank || by_mass;
    {
        u32 n[4] = {}, places[4] = {};
        for (int b = 0; b < BLOCKS; b++) {
            const uint4 c = peer_words(&s.bins[0][4 * thread], b), q = peer_words(&s.bins[1][4 * thread], b);
            n[0] += c.x, n[1] += c.y, n[2] += c.z, n[3] += c.w;
            places[0] += q.x, places[1] += q.y, places[2] += q.z, places[3] += q.w;
        }
        // 1 - e^(-1/64), in 64ths.
        const double slope = 0.015503562994591;
        double mass[4], sum = 0.0;
        u32 counted = 0;
        double edge = exponential(-4.0 / 64.0 * thread);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            mass[j] = edge * (n[j] - slope * (places[j] + 0.5 * n[j]) / 64.0);
            edge *= 1.0 - slope;
            sum += mass[j];
            counted += n[j];
        }
        double total;
        u32 all;
        double mass_before = before_thread(sum, s.room, total);
        u32 before = before_thread(counted, s.count_room, all);
        const double goal = how.top_p * total, slack = 2e-4 * total;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int bin = 4 * thread + j;
            const u32 after = before + n[j];
            const double mass_after = mass_before + mass[j];
            if (by_rank) {
                if (before < how.top_k && after >= how.top_k) {
                    s.high = bin;
                    if (!by_mass) s.low = bin, s.before = before;
                }
            } else if (by_mass) {
                if (mass_before < goal - slack && mass_after >= goal - slack) s.low = bin;
                if (mass_before < goal + slack && mass_after >= goal + slack) s.high = bin;
            }
            // The last bin up to which not too many are counted.
            if (after <= LIMIT && (bin == BINS - 1 || after + (j < 3 ? n[j + 1 & 3] : 0) > LIMIT)) s.limit = bin;
            before = after;
            mass_before = mass_after;
        }
        __syncthreads();
        const int inside = s.limit;
        __syncthreads();
        if (all <= LIMIT) {
            if (thread == 0) s.limit = BINS - 1;
        } else if (inside < 0 && before <= LIMIT) {
            // The step over the limit lies between the bins of two threads.
            atomicMax(&s.limit, 4 * thread + 3);
        }
        if (by_rank && by_mass && thread == 0) s.low = 0;
        if (by_mass && !by_rank && thread == 0 && s.low < 0) s.low = 0;
        __syncthreads();
    }
    const int low = s.low, high = s.high, limit = s.limit;
    if (narrowed && (high < 0 || low < 0 || high > limit)) bad = 1;
    if (bad) {
        cluster_meet();
        return;
    }

    // Lists; the others' mass.
    int listed = 0;
    float light = 0.0f;
    for (int i = begin; i < end; i += 32) {
        const float x = i + lane < end ? s.row[i + lane] : -INFINITY;
        const float y = (best - x) * bins;
        const bool exists = x >= floor, heavy = exists && y < (float)(limit + 1);
        const u32 lanes = __ballot_sync(FULL, heavy);
        const int place = listed + __popc(lanes & (1u << lane) - 1);
        if (heavy && place < LISTED) s.listed[warp][place] = i + lane;
        listed += __popc(lanes);
        if (exists && !heavy) {
            float w;
            asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(w) : "f"((best - x) * powers));
            light += w;
        }
    }
    __syncwarp();
    double kept = 0.0, all = 0.0;
    for (int i = lane; i < min_of(listed, LISTED); i += 32) {
        const int place = s.listed[warp][i];
        const float x = s.row[place];
        const int bin = (int)((best - x) * bins);
        const double w = exponential(((double)x - (double)best) * how.steepness);
        all += w;
        if (!narrowed || bin < low) kept += w;
        if (narrowed && bin >= low && bin <= high) {
            const u32 at = atomicAdd(&s.windowed, 1);
            if (at < WINDOW) s.window[at] = rank_of(x, first + place);
        }
    }
    const double rest = warp_total((double)light);
    kept = warp_total(kept);
    all = warp_total(all);
    if (lane == 0) {
        s.kept[warp] = narrowed ? kept : kept + rest;
        s.rest[warp] = rest;
        s.all[warp] = all;
        if (listed > LISTED) s.overfull = 1;
    }
    cluster_meet();

    // The window of all blocks, best first, and the end of the set.
    u32 windowed = 0, own = 0;
    for (int b = 0; b < BLOCKS; b++) {
        bad |= peer_word(&s.overfull, b);
        const u32 n = peer_word(&s.windowed, b);
        if (b < rank) own += n;
        windowed += n;
    }
    double mass = 0.0, lighter = 0.0, above = 0.0;
    if (thread < SEGMENTS) {
        mass = peer_double(&s.all[thread % WARPS], thread / WARPS);
        lighter = peer_double(&s.rest[thread % WARPS], thread / WARPS);
        above = peer_double(&s.kept[thread % WARPS], thread / WARPS);
    }
    before_thread(mass, s.room, mass);
    before_thread(lighter, s.room, lighter);
    before_thread(above, s.room, above);
    if (bad || windowed > WINDOW) {
        cluster_meet();
        return;
    }
    const double whole = mass + lighter, unsure = 8e-6 * lighter + 1e-11 * whole;
    u64 *sorted = (u64 *)s.bins;
    if (narrowed) {
        int size = 32;
        while (size < (int)windowed) size *= 2;
        for (int i = windowed + thread; i < size; i += THREADS) sorted[i] = 0;
        for (int b = 0, at = 0; b < BLOCKS; b++) {
            const int n = peer_word(&s.windowed, b);
            for (int i = thread; i < n; i += THREADS) sorted[at + i] = peer_long(&s.window[i], b);
            at += n;
        }
        __syncthreads();
        for (int run = 2; run <= size; run *= 2) {
            for (int gap = run / 2; gap > 0; gap /= 2) {
                const int i = 2 * thread - (thread & gap - 1), k = i + gap;
                if (2 * thread < size) {
                    const u64 a = sorted[i], b = sorted[k];
                    if ((a < b) == ((i & run) == 0)) sorted[i] = b, sorted[k] = a;
                }
                __syncthreads();
            }
        }
        const int most_kept = by_rank ? (int)(how.top_k - s.before) : (int)windowed;
        double w[2];
        for (int j = 0; j < 2; j++) {
            const int i = 2 * thread + j;
            w[j] = i < most_kept && i < (int)windowed ? exponential(((double)logit_of(sorted[i]) - (double)best) * how.steepness) : 0.0;
        }
        double total;
        const double before = above + before_thread(w[0] + w[1], s.room, total);
        if (by_mass) {
            const double goal = how.top_p * (by_rank ? total : whole), doubt = by_rank ? 1e-11 * total : unsure;
            double sum = before;
            for (int j = 0; j < 2; j++) {
                const int i = 2 * thread + j;
                if (i < most_kept && i < (int)windowed) {
                    if (sum < goal - doubt && sum + w[j] >= goal + doubt) s.end = i;
                    sum += w[j];
                }
            }
        } else if (thread == 0) {
            s.end = most_kept - 1;
        }
        __syncthreads();
        if (s.end < 0 || s.end >= (int)windowed) {
            cluster_meet();
            return;
        }
        const u64 least = sorted[s.end];
        if (thread == 0) s.least = least;
        for (int i = thread; i < (int)s.windowed; i += THREADS)
            if (s.window[i] >= least) {
                const u32 token = ~(u32)s.window[i];
                const double w = exponential(((double)logit_of(s.window[i]) - (double)best) * how.steepness);
                atomicAdd(&s.added[(token - first) / segment], w);
            }
    }
    cluster_meet();
    const u64 least = s.least;
    double mine = 0.0, total;
    if (thread < SEGMENTS)
        mine = peer_double(&s.kept[thread % WARPS], thread / WARPS) + peer_double(&s.added[thread % WARPS], thread / WARPS);
    const double ahead = before_thread(mine, s.room, total);
    const double goal = how.uniform * total, doubt = 1e-11 * total + (narrowed ? 0.0 : 8e-6 * lighter);
    if (thread < SEGMENTS && ahead <= goal && goal < ahead + mine) {
        s.at = thread;
        s.ahead = ahead;
    }
    __syncthreads();
    const int segment_of = s.at;
    const double start = s.ahead;
    // The segment is looked through by its block.
    if (segment_of >= 0 && segment_of / WARPS == rank) {
        const int from_token = min_of(segment_of % WARPS * segment, count), to_token = min_of(from_token + segment, count);
        const int each = (segment + THREADS - 1) / THREADS;
        double sum = 0.0;
        for (int j = 0; j < each; j++) {
            const int i = from_token + each * thread + j;
            if (i >= to_token) break;
            const float x = s.row[i];
            if (x >= floor && rank_of(x, first + i) >= least) sum += exponential(((double)x - (double)best) * how.steepness);
        }
        double all_of_it, at = start + before_thread(sum, s.room, all_of_it);
        if (at <= goal && goal < at + sum)
            for (int j = 0; j < each; j++) {
                const int i = from_token + each * thread + j;
                if (i >= to_token) break;
                const float x = s.row[i];
                if (!(x >= floor && rank_of(x, first + i) >= least)) continue;
                const double w = exponential(((double)x - (double)best) * how.steepness);
                if (at <= goal - doubt && goal + doubt < at + w) tokens[item] = first + i;
                at += w;
            }
    }
    cluster_meet();
}
