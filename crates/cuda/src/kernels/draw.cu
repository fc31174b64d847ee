// Tokens drawn from rows of logits: temperature, min-p, top-k, top-p, without sorting a row and without bringing it to the host.
//
// A cluster of eight blocks holds a row in shared memory, so that it comes from memory once. Tokens are counted in bins of 1/64 of
// the temperature below the largest logit, and of 1/32 where the best ones are counted off; a narrow bin's count bounds its mass to
// 0.8 %. From the bins follow a window, which holds the end of the set that is drawn from, and a limit, above which tokens are
// listed. Listed tokens weigh in f64 as on the host, the
// others in f32; the window's are sorted. A draw goes by token: through the sums of 128 segments, then through one segment.
//
// What a sum can be wrong by is known. Where the end of the set or the draw comes closer to the next token than that, or the
// window or a list is too full, the row is left to the host: a token that is given is the host's.
#include "common.cuh"

#define THREADS 512
#define WARPS 16
#define BLOCKS 8
#define SEGMENTS (BLOCKS * WARPS)
#define BINS 1024
#define COPIES 4
// Tokens are counted down to this bin, 12 temperatures below the best or 24; those below are summed only.
#define REACH 768
#define WINDOW 1024
// Listed tokens of a warp, and of a row.
#define LISTED 256
#define LIMIT 16384
#define NONE 0xffffffffu

#include "draws.cuh"

struct Shared {
    // The sorted window is in place of the bins.
    union {
        u32 bins[COPIES][BINS];
        u64 sorted[WINDOW];
    };
    u32 counts[BINS / 2];
    u64 window[WINDOW];
    // A warp's segment: what is kept above the window and inside it, what is not listed, what is.
    double kept[WARPS], added[WARPS], rest[WARPS], all[WARPS];
    double room[WARPS], totals[SEGMENTS / 32][3];
    double far, ahead;
    u32 count_room[WARPS];
    float largest;
    u32 overfull, windowed;
    int low, high, limit, end, at;
    u32 before, needed;
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
    for (int i = thread; i < COPIES * BINS; i += THREADS) s.bins[0][i] = 0;
    if (thread == 0) {
        s.overfull = s.windowed = 0;
        s.largest = -INFINITY;
        s.low = s.high = s.limit = s.end = s.at = -1;
        s.before = s.needed = 0;
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
                if (rule.mask != NONE) {
                    const u32 bits = masks[rule.mask + (first + i) / 32] >> ((first + i) & 31);
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        if (!(bits >> e & 1) && x[e] == x[e]) x[e] = -INFINITY;
                }
                if (i + 4 > end) {
#pragma unroll
                    for (int e = 1; e < 4; e++)
                        if (i + e >= end) x[e] = -INFINITY;
                }
                best = most(best, most(most(x[0], x[1]), most(x[2], x[3])));
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
        // What is read four at a time reads nothing else.
        if (end > begin && lane < (-end & 3)) s.row[end + lane] = -INFINITY;
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

    // Counts in bins, two to a word; the sum of what is below.
    const float floor = __double2float_ru(how.floor == -(double)INFINITY ? -1.7e308 : __dadd_rn((double)best, how.floor));
    const float parts = how.top_k > 0 ? 32.0f : 64.0f;
    const float bins = (float)(parts * how.steepness), powers = -1.4426950408889634f / parts;
    float light = 0.0f;
    u32 *own_bins = s.bins[warp % COPIES];
    for (int i = begin + 4 * lane; i < end; i += 128) {
        const float4 four = *(const float4 *)(s.row + i);
        const float x[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const float y = (best - x[e]) * bins;
            if (x[e] >= floor) {
                if (y < (float)REACH)
                    atomicAdd(&own_bins[(int)y], 1u);
                else
                    light += power(y * powers);
            }
        }
    }
    {
        double far;
        before_thread((double)light, s.room, far);
        u32 n[2] = {};
#pragma unroll
        for (int c = 0; c < COPIES; c++) {
            n[0] += s.bins[c][2 * thread];
            n[1] += s.bins[c][2 * thread + 1];
        }
        s.counts[thread] = n[0] | n[1] << 16;
        if (thread == 0) s.far = far;
    }
    cluster_meet();

    // The window and the limit, from counts and masses of all before each bin.
    const bool by_rank = how.top_k > 0, by_mass = how.top_p < 1.0, narrowed = by_rank || by_mass;
    u32 bad = 0;
    {
        u32 n[2] = {};
        double far = 0.0;
        for (int b = 0; b < BLOCKS; b++) {
            const u32 pair = peer_word(&s.counts[thread], b);
            n[0] += pair & 0xffffu;
            n[1] += pair >> 16;
            far += peer_double(&s.far, b);
        }
        // (1 + e^(-1/64)) / 2, which is 0.8 % from either edge of a bin, and e^(-1/64).
        const double middle = 0.992248218502704, step = 0.984496437005408, wrong = 0.0079;
        const double edge = middle * exponential(-2.0 / 64.0 * thread);
        const double mass[2] = {n[0] * edge, n[1] * edge * step};
        double total;
        u32 all;
        double heavy = before_thread(mass[0] + mass[1], s.room, total);
        u32 before = before_thread(n[0] + n[1], s.count_room, all);
        total += far;
        // Whether so much mass from the best down may be, and is for certain, all that is kept.
        const double odds = how.top_p, against = 1.0 - how.top_p;
        bool may = heavy * (1.0 + wrong) * against >= odds * (total - heavy) * (1.0 - wrong);
        bool sure = heavy * (1.0 - wrong) * against >= odds * (total - heavy) * (1.0 + wrong);
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const int bin = 2 * thread + j;
            const u32 after = before + n[j];
            heavy += mass[j];
            const bool may_after = heavy * (1.0 + wrong) * against >= odds * (total - heavy) * (1.0 - wrong);
            const bool sure_after = heavy * (1.0 - wrong) * against >= odds * (total - heavy) * (1.0 + wrong);
            if (by_rank) {
                if (before < how.top_k && after >= how.top_k) {
                    s.high = bin;
                    s.needed = after;
                    if (!by_mass) s.low = bin, s.before = before;
                }
            } else if (by_mass) {
                if (!may && may_after) s.low = bin;
                if (!sure && sure_after) s.high = bin, s.needed = after;
            }
            // The last bin up to which not too many are counted.
            if (j == 0 && after <= LIMIT && after + n[1] > LIMIT) s.limit = bin;
            before = after;
            may = may_after;
            sure = sure_after;
        }
        __syncthreads();
        const int inside = s.limit;
        __syncthreads();
        if (all <= LIMIT) {
            if (thread == 0) s.limit = REACH - 1;
        } else if (inside < 0 && before <= LIMIT) {
            // The step over the limit lies between the bins of two threads.
            atomicMax(&s.limit, 2 * thread + 1);
        }
        if (by_rank && by_mass && thread == 0) s.low = 0;
        __syncthreads();
    }
    const int low = s.low, high = s.high, limit = max_of(s.limit, high);
    if (narrowed && (high < 0 || low < 0 || s.needed > LIMIT)) bad = 1;
    if (bad) {
        cluster_meet();
        return;
    }

    // Lists; the others' mass.
    int listed = 0;
    for (int i = begin; i < end; i += 128) {
        const int at = i + 4 * lane;
        float x[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
        if (at < end) {
            const float4 four = *(const float4 *)(s.row + at);
            x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
        }
        const float y = (best - most(most(x[0], x[1]), most(x[2], x[3]))) * bins;
        // Mostly all four are below what is counted.
        if (!__any_sync(FULL, y < (float)REACH)) continue;
        u32 heavy = 0;
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const float y = (best - x[e]) * bins;
            if (x[e] >= floor && y < (float)REACH) {
                if (y < (float)(limit + 1))
                    heavy |= 1u << e;
                else
                    light += power(y * powers);
            }
        }
        if (!__any_sync(FULL, heavy != 0)) continue;
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const bool mine = heavy >> e & 1;
            const u32 lanes = __ballot_sync(FULL, mine);
            const int place = listed + __popc(lanes & (1u << lane) - 1);
            if (mine && place < LISTED) s.listed[warp][place] = at + e;
            listed += __popc(lanes);
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
    if (warp < SEGMENTS / 32) {
        mass = warp_total(peer_double(&s.all[thread % WARPS], thread / WARPS));
        lighter = warp_total(peer_double(&s.rest[thread % WARPS], thread / WARPS));
        above = warp_total(peer_double(&s.kept[thread % WARPS], thread / WARPS));
        if (lane == 0) s.totals[warp][0] = mass, s.totals[warp][1] = lighter, s.totals[warp][2] = above;
    }
    __syncthreads();
    mass = lighter = above = 0.0;
#pragma unroll
    for (int w = 0; w < SEGMENTS / 32; w++) mass += s.totals[w][0], lighter += s.totals[w][1], above += s.totals[w][2];
    if (bad || windowed > WINDOW) {
        cluster_meet();
        return;
    }
    const double whole = mass + lighter, unsure = 8e-6 * lighter + 1e-11 * whole;
    u64 *sorted = s.sorted;
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
                // Up to 64 are one warp's.
                if (size > 64) __syncthreads();
                else __syncwarp();
            }
        }
        __syncthreads();
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
    // Nobody reads another's memory from here on.
    cluster_meet();
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
}
