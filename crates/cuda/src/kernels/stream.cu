// Tokens drawn from rows of logits, a block a row, which reads the row as a stream and keeps little of it.
//
// First pass: the largest logit and the mass of each chunk of 512 tokens; heavy tokens are counted, or their mass is summed, in 32
// bins for each factor of two in weight. From the bins follow two logits between which the set that is drawn from ends. Second
// pass, only over the chunks that reach so high: what is above weighs in f64 as on the host, what lies between is listed and sorted.
// A list that is too full is narrowed by counting its keys. Where the many light tokens' f32 masses leave a doubt, the second pass
// takes all tokens in f64. A draw goes by token: through the chunks' masses, then through one chunk.
//
// What a sum can be wrong by is known. Where the end of the set or the draw comes closer to the next token than that, the row is left
// to the host: a token that is given is the host's.
#include "common.cuh"

#define THREADS 512
#define WARPS 16
#define CHUNK 512
#define BINS 4096
// The bin of the weight 2^-64.
#define LOWEST (63 << 5)
#define WINDOW 2048
#define NONE 0xffffffffu
#define LEAST -3.4028234663852886e38f
// What f64 sums of a row can be wrong by, sums of f32 weights, and masses in bins.
#define WRONG 7e-11
#define WRONG_LIGHT 1e-5
#define WRONG_BINS 1e-4

#include "draws.cuh"

// Behind it: the chunks' masses kept, masses, largest keys, listed tokens, and a bit for each token read plainly.
struct Shared {
    union {
        u32 bins[BINS];
        u64 sorted[WINDOW];
        float chunk[CHUNK];
    };
    double room[WARPS], low_mass, high_mass, ahead;
    u32 keys[WARPS], count_room[WARPS];
    int low, high, at, end;
    u32 listed, over, least_key, most_key, token, spare[2];
    // How the row is drawn: registers are scarce.
    u32 by_rank, by_mass, narrowed, ruled, wide;
    Draw how;
    u64 least;
};
static_assert(sizeof(Shared) == HEAD, "the launcher knows what lies before the chunks");

DEVICE float changed(float x, const Change &c) {
    x = __fadd_rn(x, c.bias);
    x = x > 0.0f ? __fdiv_rn(x, c.repetition) : __fmul_rn(x, c.repetition);
    return __fsub_rn(x, c.minus);
}

// Grows with the logit; what is not a number has the largest.
DEVICE u32 key_of(float x) {
    if (x != x) return NONE;
    const u32 bits = __float_as_uint(x + 0.0f);
    return (int)bits < 0 ? ~bits : bits | 0x80000000u;
}
DEVICE float logit_of(u32 key) { return __uint_as_float((int)key < 0 ? key & 0x7fffffffu : ~key); }
// Falls with the token besides.
DEVICE u64 rank_of(float x, u32 token) { return (u64)key_of(x) << 32 | (u32)~token; }

// e^x, to 1e-12 of its value.
DEVICE double exponential(double x) {
    x = x > -700.0 ? x : -700.0;
    const double round = 6755399441055744.0;
    const double shifted = fma(x, 1.4426950408889634, round);
    const double n = shifted - round;
    double r = fma(n, -0.6931471803691238, x);
    r = fma(n, -1.9082149292705877e-10, r);
    double p = 1.0 / 3628800.0;
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

DEVICE float logarithm(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

template <typename T>
DEVICE T block_total(T v, T *room) {
    T total;
    before_thread(v, room, total);
    return total;
}

// A row: where it is, what is read of it plainly.
struct Row {
    const float *logits;
    int vocabulary;
    const u32 &wide, &ruled;
    const u32 *plain;

    // A lane's logits of a chunk or its half: 4 from each 128 tokens.
    template <int N>
    __device__ __forceinline__ void load(float (&x)[N], int first, int lane) const {
        // Addresses are computed anew for each chunk: kept over the loops they would cost registers.
        asm volatile("" : "+r"(first));
#pragma unroll
        for (int j = 0; j < N / 4; j++) {
            const int at = first + 128 * j + 4 * lane;
            if (wide && at + 4 <= vocabulary) {
                const uint4 v = load_stream(logits + at);
                x[4 * j] = __uint_as_float(v.x), x[4 * j + 1] = __uint_as_float(v.y);
                x[4 * j + 2] = __uint_as_float(v.z), x[4 * j + 3] = __uint_as_float(v.w);
            } else {
#pragma unroll
                for (int e = 0; e < 4; e++) x[4 * j + e] = at + e < vocabulary ? logits[at + e] : -INFINITY;
            }
        }
        if (!ruled) return;
#pragma unroll
        for (int j = 0; j < N / 4; j++) {
            const int at = first + 128 * j + 4 * lane;
            const u32 bits = plain[at / 32] >> (at & 31);
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (!(bits >> e & 1) && x[4 * j + e] == x[4 * j + e]) x[4 * j + e] = -INFINITY;
        }
    }
};

// The token of each rule's row, NONE where the host has to look. With `open` only rows that have none yet are drawn. `chunks` is
// the number of chunks of the vocabulary.
extern "C" __global__ void __launch_bounds__(THREADS, 2) stream(const float *logits, int width, int vocabulary, int chunks, int open,
                                                                const Rule *rules, const Draw *draws, const Change *changes,
                                                                const u32 *masks, u32 *tokens) {
    extern __shared__ __align__(16) unsigned char memory[];
    Shared &s = *(Shared *)memory;
    double *const kept = (double *)(memory + HEAD);
    float *const sums = (float *)(kept + chunks);
    u32 *const tops = (u32 *)(sums + chunks), *const inside = tops + chunks, *const plain = inside + chunks;
    after_previous();
    const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, item = blockIdx.x;
    if (open && tokens[item] != NONE) return;
    const Rule rule = rules[item];
    if (thread == 0) {
        const Draw how = draws[item];
        s.how = how;
        s.by_rank = how.top_k > 0 && how.top_k < (u32)vocabulary;
        s.by_mass = how.top_p < 1.0;
        s.narrowed = s.by_rank || s.by_mass;
        s.ruled = rule.count > 0 || rule.mask != NONE;
        s.wide = width % 4 == 0;
    }
    __syncthreads();
    const Draw &how = s.how;
    const u32 &by_rank = s.by_rank, &by_mass = s.by_mass, &narrowed = s.narrowed, &ruled = s.ruled;
    const double &steepness = how.steepness;
    const float slope = (float)(steepness * 1.4426950408889634);
    const Row row = {logits + (u64)rule.row * width, vocabulary, s.wide, ruled, plain};
    const Change *const own = changes + rule.first;
    // Tokens with a change, one by one: its logit now; what the mask excludes is below everything.
    auto value = [&](const Change &change) {
        const float x = row.logits[change.token];
        const bool may = rule.mask == NONE || masks[rule.mask + change.token / 32] >> (change.token & 31) & 1;
        return may || x != x ? changed(x, change) : -INFINITY;
    };

    for (int i = thread; i < BINS; i += THREADS) s.bins[i] = 0;
    for (int c = thread; c < chunks; c += THREADS) kept[c] = 0.0;
    if (thread == 0) {
        tokens[item] = NONE;
        s.low = s.high = s.at = s.end = -1;
    }
    if (ruled) {
        for (int w = thread; w < chunks * (CHUNK / 32); w += THREADS)
            plain[w] = w * 32 >= vocabulary ? 0 : rule.mask == NONE ? FULL : masks[rule.mask + w];
        __syncthreads();
        for (u32 i = thread; i < rule.count; i += THREADS) atomicAnd(&plain[own[i].token / 32], ~(1u << (own[i].token & 31)));
    }
    __syncthreads();

    const int each = (chunks + WARPS - 1) / WARPS, begin = min_of(warp * each, chunks), end = min_of(begin + each, chunks);
    float ref = 0.0f, floor = LEAST, lowest = 0.0f, best;
    double light = 0.0, mass = 0.0;
    // The first pass; a second time where the guess of the best weight was too far off, or logits far below the best go.
    for (int round = 0;; round++) {
        const bool binned = narrowed && (round > 0 || how.floor == -(double)INFINITY);
        const u32 fraction = by_rank ? 0 : 0x1fffu, one = by_rank ? 1 : 0x2000u;
        float x[16] = {};
        double faint = 0.0;
        // What is at least `limit` goes to the bins. `x` becomes weights.
        auto weigh = [&](int chunk, float limit) {
            float top = x[0];
#pragma unroll
            for (int i = 1; i < 16; i++) top = most(top, x[i]);
            float sum = 0.0f, heaviest = 0.0f;
#pragma unroll
            for (int i = 0; i < 16; i++) {
                float w = power((x[i] - ref) * slope);
                if (round > 0) w = x[i] >= floor ? w : 0.0f;
                x[i] = w;
                sum += w;
                heaviest = fmaxf(heaviest, w);
            }
            if (binned) {
                if (__any_sync(FULL, heaviest >= limit)) {
                    float rest = 0.0f;
#pragma unroll
                    for (int i = 0; i < 16; i++) {
                        const u32 bits = __float_as_uint(x[i]);
                        if (x[i] >= limit)
                            atomicAdd(&s.bins[min_of((bits >> 18) - LOWEST, BINS - 1)], bits >> 10 & fraction | one);
                        else
                            rest += x[i];
                    }
                    faint += rest;
                } else {
                    faint += sum;
                }
            }
            const u32 key = __reduce_max_sync(FULL, key_of(top));
            sum = warp_sum(sum);
            if (lane == 0) tops[chunk] = key, sums[chunk] = sum;
        };
        int from = begin;
        if (round == 0) {
            // A guess from a sample: a chunk of each warp.
#pragma unroll
            for (int i = 0; i < 16; i++) x[i] = -INFINITY;
            if (begin < end) row.load(x, CHUNK * begin, lane);
            float top = x[0];
#pragma unroll
            for (int i = 1; i < 16; i++) top = most(top, x[i]);
            const u32 key = __reduce_max_sync(FULL, key_of(top));
            if (lane == 0) s.keys[warp] = key;
            __syncthreads();
            u32 all = 0;
#pragma unroll
            for (int w = 0; w < WARPS; w++) all = s.keys[w] > all ? s.keys[w] : all;
            ref = logit_of(all);
            if (!(ref > -1e37f && ref < 1e37f)) ref = 0.0f;
            // Tokens of less than 1 - p of the mean weight are behind the end of the set, and tokens with as many heavier ones in the
            // sample as are kept.
            lowest = 5.5e-20f;
            if (binned && !by_rank) {
                float sum = 0.0f;
#pragma unroll
                for (int i = 0; i < 16; i++) sum += power((x[i] - ref) * slope);
                sum = warp_sum(sum);
                if (lane == 0) s.room[warp] = sum;
                __syncthreads();
                double found = 0.0, first = 0.0, second = 0.0;
#pragma unroll
                for (int w = 0; w < WARPS; w++) {
                    const double v = s.room[w];
                    found += v;
                    second = v > first ? first : v > second ? v : second;
                    first = v > first ? v : first;
                }
                const double rest = (found - first - second) * (0.5 / WARPS) * chunks;
                lowest = fmaxf(lowest, (float)(0.99 * (1.0 - how.top_p) * (found + rest) / vocabulary));
                __syncthreads();
            }
            if (begin < end) weigh(begin, lowest);
            from = begin + 1;
            if (binned && by_rank) {
                __syncthreads();
                u32 n = 0, total;
#pragma unroll
                for (int j = 0; j < 8; j++) n += s.bins[BINS - 1 - 8 * thread - j];
                u32 before = before_thread(n, s.count_room, total);
                if (before < how.top_k && before + n >= how.top_k)
                    for (int j = 0; j < 8; j++) {
                        const int bin = BINS - 1 - 8 * thread - j;
                        before += s.bins[bin];
                        if (before >= how.top_k) {
                            s.low = bin;
                            break;
                        }
                    }
                __syncthreads();
                if (s.low >= 0) lowest = __uint_as_float((u32)(s.low + LOWEST) << 18);
                __syncthreads();
                if (thread == 0) s.low = -1;
            }
        }
        const u32 reach = key_of(floor);
        const float far = ref - 60.0f / slope;
        const u32 needed = round > 0 ? (key_of(far) > reach ? key_of(far) : reach) : 0;
#pragma unroll 1
        for (int chunk = from; chunk < end; chunk++) {
            if (round > 0 && tops[chunk] < needed) {
                if (lane == 0) sums[chunk] = 0.0f;
                continue;
            }
            row.load(x, CHUNK * chunk, lane);
            weigh(chunk, lowest);
        }
        __syncthreads();
        for (u32 i = thread; i < rule.count; i += THREADS) {
            const Change change = own[i];
            const float v = value(change);
            atomicMax(&tops[change.token / CHUNK], key_of(v));
            const float w = v >= floor ? power((v - ref) * slope) : 0.0f;
            const u32 bits = __float_as_uint(w);
            if (w > 0.0f) {
                atomicAdd(&kept[change.token / CHUNK], (double)w);
                if (binned && w >= lowest)
                    atomicAdd(&s.bins[min_of((bits >> 18) - LOWEST, BINS - 1)], bits >> 10 & fraction | one);
                else
                    faint += w;
            }
        }
        __syncthreads();
        u32 top = 0;
        double sum = 0.0;
        for (int c = thread; c < chunks; c += THREADS) {
            top = tops[c] > top ? tops[c] : top;
            // Many changed tokens of a chunk are not added in f32.
            sum += sums[c] = (float)(sums[c] + kept[c]);
            kept[c] = 0.0;
        }
        top = __reduce_max_sync(FULL, top);
        if (lane == 0) s.keys[warp] = top;
        mass = block_total(sum, s.room);
        light = block_total(faint, s.room);
#pragma unroll
        for (int w = 0; w < WARPS; w++) top = s.keys[w] > top ? s.keys[w] : top;
        best = top == NONE ? INFINITY : logit_of(top);
        if (!(best > -INFINITY && best < INFINITY)) return;
        const float height = (best - ref) * slope;
        if (round > 0 || (how.floor == -(double)INFINITY && height >= 0.0f && height <= 62.0f)) break;
        ref = best;
        if (how.floor > -(double)INFINITY) floor = fmaxf(__double2float_ru(__dadd_rn((double)best, how.floor)), LEAST);
        lowest = by_rank ? 5.5e-20f : fmaxf(5.5e-20f, (float)(0.99 * (1.0 - how.top_p) / vocabulary));
        for (int i = thread; i < BINS; i += THREADS) s.bins[i] = 0;
        __syncthreads();
    }
    let_next_begin();

    // Between these two the set ends.
    float above = floor, below = floor;
    bool exact = false;
    if (narrowed) {
        const float margin = 3e-5f / (float)steepness + 1e-6f * (fabsf(ref) + fabsf(best));
        double m[8], all = 0.0, total;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const int bin = BINS - 1 - 8 * thread - j;
            const double unit = __longlong_as_double((u64)(1023 - 64 - 13 + (bin >> 5)) << 52);
            m[j] = by_rank ? (double)s.bins[bin] : 1.000061 * unit * s.bins[bin];
            all += m[j];
        }
        double heavy = before_thread(all, s.room, total);
        const double odds = how.top_p, against = 1.0 - odds, k = how.top_k;
        if (!by_rank) total += light;
        bool may = heavy * (1.0 + WRONG_BINS) * against >= odds * (total - heavy) * (1.0 - WRONG_BINS);
        bool sure = heavy * (1.0 - WRONG_BINS) * against >= odds * (total - heavy) * (1.0 + WRONG_BINS);
        if (by_rank) may = sure = heavy >= k;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const int bin = BINS - 1 - 8 * thread - j;
            heavy += m[j];
            bool may_after = heavy * (1.0 + WRONG_BINS) * against >= odds * (total - heavy) * (1.0 - WRONG_BINS);
            bool sure_after = heavy * (1.0 - WRONG_BINS) * against >= odds * (total - heavy) * (1.0 + WRONG_BINS);
            if (by_rank) may_after = sure_after = heavy >= k;
            if (!may && may_after) s.high = bin;
            if (!sure && sure_after) s.low = bin, s.low_mass = total - heavy;
            may = may_after;
            sure = sure_after;
        }
        __syncthreads();
        // A bin's lower edge as a logit.
        auto edge = [&](float weight) { return ref + logarithm(weight) / slope; };
        const float least = s.low >= 0 ? __uint_as_float((u32)(s.low + LOWEST) << 18) : 0.0f;
        below = s.low >= 0 ? fmaxf(edge(least) - margin, floor) : floor;
        above = s.high >= 0 ? edge(__uint_as_float((u32)(s.high + LOWEST + 1) << 18)) + margin : edge(lowest) + margin;
        if (by_rank && by_mass) above = INFINITY;
        above = fmaxf(above, floor);
        // Light tokens that would leave a doubt at the end of the set are weighed like the others.
        exact = by_mass && !by_rank && (s.low < 0 || 64.0 * WRONG_LIGHT * s.low_mass > least);
        __syncthreads();
    } else {
        for (int c = thread; c < chunks; c += THREADS) kept[c] = sums[c];
    }

    // The second pass, narrower or closer until it is known what is drawn from, and then the draw.
    bool summed = !narrowed;
    double whole = mass, lighter = mass;
    u64 least = 0;
#pragma unroll 1
    for (int turn = 0; turn < 8; turn++) {
        if (!summed || exact) {
            const float cut = exact ? floor : below;
            const u32 reach = key_of(cut);
            double heavy = 0.0;
            double faint = 0.0;
            __syncthreads();
            if (thread == 0) s.listed = s.over = 0, s.end = s.at = -1, s.least = 0, s.least_key = NONE, s.most_key = 0;
            __syncthreads();
#pragma unroll 1
            for (int chunk = begin; chunk < end; chunk++) {
                if (tops[chunk] < reach) {
                    if (lane == 0) kept[chunk] = 0.0, inside[chunk] = 0;
                    continue;
                }
                double here = 0.0;
                u32 listed = 0;
#pragma unroll 1
                for (int first = CHUNK * chunk; first < CHUNK * (chunk + 1); first += CHUNK / 2) {
                    float x[8];
                    row.load(x, first, lane);
                    u32 between = 0;
                    float rest = 0.0f;
#pragma unroll
                    for (int i = 0; i < 8; i++) {
                        const float v = x[i];
                        if (v >= cut) {
                            const double w = exponential(((double)v - (double)ref) * steepness);
                            heavy += w;
                            if (v >= above) here += w, between |= 0x100u << i;
                        } else if (v >= floor) {
                            rest += power((v - ref) * slope);
                        }
                        if (narrowed && v >= below && v < above) between |= 1u << i;
                    }
                    faint += rest;
                    if (by_rank) {
                        const u32 over = __reduce_add_sync(FULL, __popc(between >> 8));
                        if (lane == 0 && over > 0) atomicAdd(&s.over, over);
                    }
                    const u32 n = __popc(between & 0xffu), count = __reduce_add_sync(FULL, n);
                    listed += count;
                    if (count > 0) {
                        u32 upto = n;
#pragma unroll
                        for (int d = 1; d < 32; d <<= 1) {
                            const u32 other = __shfl_up_sync(FULL, upto, d);
                            if (lane >= d) upto += other;
                        }
                        u32 place = 0, lowest_key = NONE, highest_key = 0;
                        if (lane == 31) place = atomicAdd(&s.listed, count);
                        place = __shfl_sync(FULL, place, 31) + upto - n;
#pragma unroll
                        for (int i = 0; i < 8; i++)
                            if (between >> i & 1) {
                                const u32 key = key_of(x[i]);
                                lowest_key = key < lowest_key ? key : lowest_key;
                                highest_key = key > highest_key ? key : highest_key;
                                if (place < WINDOW) s.sorted[place] = rank_of(x[i], first + 128 * (i / 4) + 4 * lane + i % 4);
                                place++;
                            }
                        lowest_key = __reduce_min_sync(FULL, lowest_key);
                        highest_key = __reduce_max_sync(FULL, highest_key);
                        if (lane == 0) {
                            atomicMin(&s.least_key, lowest_key);
                            atomicMax(&s.most_key, highest_key);
                        }
                    }
                }
                here = warp_total(here);
                if (lane == 0) kept[chunk] = here, inside[chunk] = listed;
            }
            __syncthreads();
            for (u32 i = thread; i < rule.count; i += THREADS) {
                const Change change = own[i];
                const int chunk = change.token / CHUNK;
                if (tops[chunk] < reach) continue;
                const float v = value(change);
                if (v >= cut) {
                    const double w = exponential(((double)v - (double)ref) * steepness);
                    heavy += w;
                    if (v >= above) {
                        atomicAdd(&s.over, 1);
                        atomicAdd(&kept[chunk], w);
                    }
                } else if (v >= floor) {
                    faint += power((v - ref) * slope);
                }
                if (narrowed && v >= below && v < above) {
                    const u32 key = key_of(v);
                    atomicMin(&s.least_key, key);
                    atomicMax(&s.most_key, key);
                    atomicAdd(&inside[chunk], 1);
                    const u32 place = atomicAdd(&s.listed, 1);
                    if (place < WINDOW) s.sorted[place] = rank_of(v, change.token);
                }
            }
            __syncthreads();
            // Chunks that were not read count with what they had in the first pass.
            double high = 0.0, light = faint;
            for (int c = thread; c < chunks; c += THREADS) {
                high += kept[c];
                if (tops[c] < reach) light += sums[c];
            }
            const double weighed = block_total(heavy, s.room);
            lighter = block_total(light, s.room);
            high = block_total(high, s.room);
            const u32 over = s.over;
            whole = weighed + lighter;
            summed = true;
            least = 0;
            if (narrowed) {
                const u32 listed = s.listed;
                const double goal = how.top_p * whole, doubt = WRONG * whole + WRONG_LIGHT * lighter;
                if (by_rank && over >= how.top_k) return;
                if (!by_rank && high >= goal - doubt) {
                    if (exact) return;
                    exact = true;
                    continue;
                }
                const u32 wanted = by_rank ? how.top_k - over : 0;
                // Fewer than are kept are listed where no more exist, and only there.
                if (by_rank && listed < wanted && (listed > WINDOW || below > floor)) return;
                if (listed > WINDOW && s.least_key == s.most_key) {
                    // Equal logits: the first ones by token.
                    if (by_rank && by_mass) return;
                    const float v = logit_of(s.least_key);
                    const double w = exponential(((double)v - (double)ref) * steepness);
                    double number = by_rank ? (double)wanted : ceil((goal - high) / w);
                    if (!by_rank && !(high + (number - 1.0) * w < goal - doubt && high + number * w >= goal + doubt)) {
                        if (exact) return;
                        exact = true;
                        continue;
                    }
                    if (!(number >= 1.0 && number <= (double)listed)) return;
                    const u32 last = (u32)number;
                    u32 total, n = 0;
                    const int share = (chunks + THREADS - 1) / THREADS;
                    for (int j = 0; j < share; j++)
                        if (share * thread + j < chunks) n += inside[share * thread + j];
                    u32 before = before_thread(n, s.count_room, total);
                    for (int j = 0; j < share; j++) {
                        const int c = share * thread + j;
                        if (c >= chunks) break;
                        const u32 after = before + inside[c];
                        if (before < last) {
                            if (after >= last) s.at = c, s.token = last - before;
                            kept[c] += w * (double)(min_of(after, last) - before);
                        }
                        before = after;
                    }
                    __syncthreads();
                    const int c = s.at, token = CHUNK * c + thread;
                    const u32 nth = s.token;
                    s.chunk[thread] = token < vocabulary && (!ruled || plain[token / 32] >> (token & 31) & 1) ? row.logits[token] : -INFINITY;
                    __syncthreads();
                    for (u32 i = thread; i < rule.count; i += THREADS)
                        if ((int)(own[i].token / CHUNK) == c) s.chunk[own[i].token % CHUNK] = value(own[i]);
                    __syncthreads();
                    const bool equal = s.chunk[thread] == v;
                    const u32 place = before_thread((u32)equal, s.count_room, total);
                    if (equal && place == nth - 1) s.least = rank_of(v, token);
                    __syncthreads();
                    least = s.least;
                    s.at = -1;
                    if (least == 0) return;
                } else if (listed > WINDOW) {
                    // Counts of the keys between narrow it.
                    if (by_rank && by_mass) return;
                    const u32 low = s.least_key, range = s.most_key - low;
                    int shift = 0;
                    while (range >> shift >= BINS) shift++;
                    for (int i = thread; i < BINS; i += THREADS) s.bins[i] = 0;
                    if (thread == 0) s.low = s.high = -1;
                    __syncthreads();
                    for (int chunk = begin; chunk < end; chunk++) {
                        if (inside[chunk] == 0) continue;
                        float x[16];
                        row.load(x, CHUNK * chunk, lane);
#pragma unroll
                        for (int i = 0; i < 16; i++)
                            if (x[i] >= below && x[i] < above) atomicAdd(&s.bins[(key_of(x[i]) - low) >> shift], 1);
                    }
                    for (u32 i = thread; i < rule.count; i += THREADS) {
                        const float v = value(own[i]);
                        if (v >= below && v < above) atomicAdd(&s.bins[(key_of(v) - low) >> shift], 1);
                    }
                    __syncthreads();
                    const double start = by_rank ? (double)over : high;
                    const double goal_low = by_rank ? how.top_k - 0.5 : goal - doubt, goal_high = by_rank ? goal_low : goal + doubt;
                    double fewest = 0.0, largest = 0.0, total;
#pragma unroll 1
                    for (int phase = 0; phase < 2; phase++) {
                        const double from_least = phase ? start + before_thread(fewest, s.room, total) : 0.0;
                        const double from_most = phase ? start + before_thread(largest, s.room, total) : 0.0;
                        fewest = largest = 0.0;
                        for (int j = 0; j < 8; j++) {
                            const int bin = BINS - 1 - 8 * thread - j;
                            const u32 n = s.bins[bin];
                            if (n == 0) continue;
                            const u32 first = low + ((u32)bin << shift);
                            double up = n, down = n;
                            if (!by_rank) {
                                down *= exponential(((double)logit_of(first) - (double)ref) * steepness);
                                up *= exponential(((double)logit_of(first + ((1u << shift) - 1)) - (double)ref) * steepness);
                            }
                            if (phase && from_most + largest < goal_low && from_most + largest + up >= goal_low) s.high = bin;
                            if (phase && from_least + fewest < goal_high && from_least + fewest + down >= goal_high) s.low = bin;
                            fewest += down;
                            largest += up;
                        }
                        __syncthreads();
                    }
                    if (s.high < 0) return;
                    above = fminf(above, logit_of(low + ((u32)(s.high + 1) << shift)));
                    if (s.low >= 0) below = fmaxf(logit_of(low + ((u32)s.low << shift)), floor);
                    __syncthreads();
                    summed = false;
                    continue;
                } else if (listed == 0 && by_rank && !by_mass) {
                    // Fewer tokens than are kept.
                } else {
                    int size = 32;
                    while (size < (int)listed) size *= 2;
                    for (int i = listed + thread; i < size; i += THREADS) s.sorted[i] = 0;
                    __syncthreads();
                    for (int run = 2; run <= size; run *= 2)
                        for (int gap = run / 2; gap > 0; gap /= 2) {
                            for (int pair = thread; 2 * pair < size; pair += THREADS) {
                                const int i = 2 * pair - (pair & gap - 1), k = i + gap;
                                const u64 a = s.sorted[i], b = s.sorted[k];
                                if ((a < b) == ((i & run) == 0)) s.sorted[i] = b, s.sorted[k] = a;
                            }
                            // Up to 64 are one warp's.
                            if (size > 64) __syncthreads();
                            else __syncwarp();
                        }
                    __syncthreads();
                    const int number = by_rank ? min_of(wanted, listed) : (int)listed;
                    double w[4], sum = 0.0, total;
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        const int i = 4 * thread + j;
                        w[j] = i < number ? exponential(((double)logit_of(s.sorted[i] >> 32) - (double)ref) * steepness) : 0.0;
                        sum += w[j];
                    }
                    sum = high + before_thread(sum, s.room, total);
                    if (by_mass) {
                        const double reach = by_rank ? how.top_p * total : goal, wrong = by_rank ? WRONG * total : doubt;
#pragma unroll
                        for (int j = 0; j < 4; j++) {
                            if (4 * thread + j < number && sum < reach - wrong && sum + w[j] >= reach + wrong) s.end = 4 * thread + j;
                            sum += w[j];
                        }
                    } else if (thread == 0) {
                        s.end = number - 1;
                    }
                    __syncthreads();
                    if (s.end < 0) {
                        if (exact || by_rank) return;
                        exact = true;
                        __syncthreads();
                        continue;
                    }
                    least = s.sorted[s.end];
                    for (int i = thread; i <= s.end; i += THREADS) {
                        const u32 token = ~(u32)s.sorted[i];
                        atomicAdd(&kept[token / CHUNK], exponential(((double)logit_of(s.sorted[i] >> 32) - (double)ref) * steepness));
                    }
                }
            }
        }
        __syncthreads();
        // The chunk, then the token.
        double sum = 0.0, total;
        const int share = (chunks + THREADS - 1) / THREADS;
        for (int j = 0; j < share; j++)
            if (share * thread + j < chunks) sum += kept[share * thread + j];
        double ahead = before_thread(sum, s.room, total);
        const double goal = how.uniform * total, doubt = WRONG * total + (narrowed || exact ? 0.0 : WRONG_LIGHT * total);
        for (int j = 0; j < share; j++) {
            const int c = share * thread + j;
            if (c >= chunks) break;
            // As below: so near to its edge a chunk is not two threads'.
            if (ahead <= goal - doubt && goal + doubt < ahead + kept[c]) s.at = c, s.ahead = ahead;
            ahead += kept[c];
        }
        __syncthreads();
        const int c = s.at, token = CHUNK * c + thread;
        if (c >= 0) {
            s.chunk[thread] = token < vocabulary && (!ruled || plain[token / 32] >> (token & 31) & 1) ? row.logits[token] : -INFINITY;
            __syncthreads();
            for (u32 i = thread; i < rule.count; i += THREADS)
                if ((int)(own[i].token / CHUNK) == c) s.chunk[own[i].token % CHUNK] = value(own[i]);
            __syncthreads();
            const float v = s.chunk[thread];
            const double w = v >= floor && rank_of(v, token) >= least ? exponential(((double)v - (double)ref) * steepness) : 0.0;
            double of_chunk;
            const double at = s.ahead + before_thread(w, s.room, of_chunk);
            // Where a number is found it is the only one.
            if (at <= goal - doubt && goal + doubt < at + w) s.end = -2, tokens[item] = token;
            __syncthreads();
        }
        if (s.end == -2 || exact || narrowed) return;
        exact = true;
        above = below = floor;
        __syncthreads();
    }
}
