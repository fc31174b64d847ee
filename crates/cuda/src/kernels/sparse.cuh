// The ring of attention over selected tokens (sparse.cu), and who fills it.
//
// Units of 16 KB: an item's queries (HEADS rows of 512 halves, one unit or two), then four units a tile of 64 tokens, 128 columns
// each, as the products want them. A warpgroup copies 16 bytes a thread and runs ahead over the ends of tiles and items. Another one,
// the scouts, looks up the lengths of lists and the places of tokens up to sixteen tiles ahead, so that the copies wait for no
// load: one takes as long as everything that the copies have asked for.

#define LATENT 512
#define TILE 64
#define UNIT (TILE * 256)
#define UNITS 11
#define QUERY_UNITS (HEADS > 16 ? 2 : 1)
#define CONSUMERS 256
#define GATHERERS 128
#define SCOUTS 128
// Items and tiles whose places are known ahead; tiles that are looked up at a time.
#define ITEMS 4
#define PLACES 16
#define LOOKUP 10
#define QUERY_AT (UNITS * UNIT)
#define WEIGHT_AT (QUERY_AT + HEADS * 1024)
#define TOP_AT (WEIGHT_AT + 2 * HEADS * 128)
#define KEEP_AT (TOP_AT + HEADS * 16)
#define FACTOR_AT (KEEP_AT + HEADS * 8)
#define MARK_AT (FACTOR_AT + HEADS * 4)
#define PLACE_AT (MARK_AT + 16)
#define ITEM_AT (PLACE_AT + PLACES * TILE * 4)
#define BARRIER_AT (ITEM_AT + ITEMS * 16)

struct Args {
    const Segment *segments;
    const u32 *row_segment, *pages, *tokens, *lens;
    const u16 *latents, *queries;
    float *pieces;  // with one part: the result
    float2 *stats;
    u32 items, groups, parts, heads, width;
    float scale;  // times log2 e
    u32 halves;   // whether the result of one part is halves
};

// Barriers of a ring: `full` and `empty` of each place.
struct Barriers {
    u32 units_full, units_empty, places_full, places_empty, items_full, items_empty, weights_full, weights_empty, factors_full, factors_empty;
};

DEVICE Barriers barriers_at(u32 at) {
    Barriers b;
    b.units_full = at;
    b.units_empty = b.units_full + 8 * UNITS;
    b.places_full = b.units_empty + 8 * UNITS;
    b.places_empty = b.places_full + 8 * PLACES;
    b.items_full = b.places_empty + 8 * PLACES;
    b.items_empty = b.items_full + 8 * ITEMS;
    b.weights_full = b.items_empty + 8 * ITEMS;
    b.weights_empty = b.weights_full + 16;
    b.factors_full = b.weights_empty + 16;
    b.factors_empty = b.factors_full + 8;
    return b;
}

// What an item covers.
struct Item {
    u32 row, group;
    int count, first_tile, last_tile;
};

DEVICE Item item_of(const Args &p, u32 at, int count) {
    Item i;
    const u32 part = at % p.parts, rest = at / p.parts;
    i.group = rest % p.groups;
    i.row = rest / p.groups;
    i.count = count;
    const u32 tiles = (count + TILE - 1) / TILE;
    i.first_tile = tiles * part / p.parts;
    i.last_tile = tiles * (part + 1) / p.parts;
    return i;
}

// The block's item `number`, as the scout found it.
DEVICE Item take_item(const Args &p, const u8 *room, const Barriers &b, u32 at, u32 number) {
    const u32 slot = number % ITEMS;
    barrier_wait(b.items_full + 8 * slot, number / ITEMS & 1);
    // The same in all lanes, and known to be: descriptors are then computed once a warp.
    const int count = __shfl_sync(FULL, *(volatile const int *)(room + ITEM_AT + 4 * slot), 0);
    if ((threadIdx.x & 31) == 0) barrier_arrive(b.items_empty + 8 * slot);
    return item_of(p, at, count);
}

// Ahead of all others: lengths of the lists, and where their tokens lie in the cache, whole tiles; beyond the last token its
// place again. A half of the threads has even tiles of a look-up, the other odd ones.
DEVICE void scout(const Args &p, u8 *room, const Barriers &b) {
    const int thread = threadIdx.x & 127, half = thread >> 6, token = thread & 63;
    u32 *places = (u32 *)(room + PLACE_AT);
    u32 tile_number = 0, number = 0;
    auto row_of = [&](u32 at) { return min_of(at, p.items - 1) / p.parts / p.groups; };
    // Each load is asked for an item before its result is needed.
    u32 row = row_of(blockIdx.x), next_row = row_of(blockIdx.x + gridDim.x);
    u32 count = p.lens[row], first_page = p.segments[p.row_segment[row]].first_page, next_segment = p.row_segment[next_row];
    for (u32 at = blockIdx.x; at < p.items; at += gridDim.x, number++) {
        const u32 after_row = row_of(at + 2 * gridDim.x);
        const u32 next_count = p.lens[next_row], next_page = p.segments[next_segment].first_page;
        const u32 after_segment = p.row_segment[after_row];
        if (thread == 0) {
            const u32 slot = number % ITEMS;
            barrier_wait(b.items_empty + 8 * slot, (number / ITEMS & 1) ^ 1);
            *(volatile u32 *)(room + ITEM_AT + 4 * slot) = count;
            barrier_arrive(b.items_full + 8 * slot);
        }
        __syncwarp();
        const Item item = item_of(p, at, count);
        const u32 *list = p.tokens + (u64)row * p.width;
        for (int first = item.first_tile + half; first < item.last_tile; first += LOOKUP) {
            u32 place[LOOKUP / 2];
#pragma unroll
            for (int i = 0; i < LOOKUP / 2; i++)
                place[i] = first + 2 * i < item.last_tile ? list[min_of(TILE * (first + 2 * i) + token, item.count - 1)] : 0;
#pragma unroll
            for (int i = 0; i < LOOKUP / 2; i++)
                if (first + 2 * i < item.last_tile) place[i] = p.pages[first_page + place[i] / PAGE] * PAGE + place[i] % PAGE;
#pragma unroll
            for (int i = 0; i < LOOKUP / 2; i++) {
                if (first + 2 * i < item.last_tile) {
                    const u32 to = tile_number + first - item.first_tile + 2 * i, at = to % PLACES;
                    barrier_wait(b.places_empty + 8 * at, (to / PLACES & 1) ^ 1);
                    places[at * TILE + token] = place[i];
                    barrier_arrive(b.places_full + 8 * at);
                }
            }
        }
        tile_number += item.last_tile - item.first_tile;
        row = next_row;
        count = next_count;
        first_page = next_page;
        next_row = after_row;
        next_segment = after_segment;
    }
}

DEVICE void copy_16_or_zero(u32 to, const void *from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}

DEVICE void copy_16_with(u32 to, const void *from, u64 policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "l"(policy) : "memory");
}

// Fills the ring: an item's queries, then its tiles.
DEVICE void gather(const Args &p, u8 *room, u32 base, const Barriers &b) {
    const int thread = threadIdx.x - CONSUMERS, warp = thread >> 5, lane = thread & 31;
    const int line = 2 * warp + (lane >> 4);
    const u32 inside = ((lane & 15) >> 3) * (TILE * 128) + line * 128 + (((lane & 7) ^ line) << 4);
    const u32 *places = (const u32 *)(room + PLACE_AT);
    u32 slot = 0, phase = 1, number = 0, tile_number = 0;
    auto passed = [&] {
        copies_arrive(b.units_full + 8 * slot);
        if (++slot == UNITS) {
            slot = 0;
            phase ^= 1;
        }
    };
    // Latents of few rows are read once; the parts' sums are to stay in the second-level cache instead.
    u64 policy;
    if (p.parts > 1)
        asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    else
        asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    for (u32 at = blockIdx.x; at < p.items; at += gridDim.x, number++) {
        const Item item = take_item(p, room, b, at, number);
#pragma unroll
        for (int u = 0; u < QUERY_UNITS; u++) {
            barrier_wait(b.units_empty + 8 * slot, phase);
            // A row of the unit is eight chunks of a head.
#pragma unroll 1
            for (int i = 0; i < HEADS / (2 * QUERY_UNITS); i++) {
                const int line = (HEADS * 8 / QUERY_UNITS) * u + 16 * i + (thread >> 3);
                const int head = line % HEADS, chunk = line / HEADS * 8 + ((thread & 7) ^ (head & 7)), h = item.group * HEADS + head;
                copy_16_or_zero(base + slot * UNIT + (16 * i + (thread >> 3)) * 128 + (thread & 7) * 16,
                                p.queries + ((u64)item.row * p.heads + min_of(h, p.heads - 1)) * LATENT + 8 * chunk,
                                h < (int)p.heads);
            }
            passed();
        }
        for (int tile = item.first_tile; tile < item.last_tile; tile++, tile_number++) {
            // Lane l < 16 takes the place of the tile's token 8 (l / 2) + 2 warp + l % 2.
            const u32 from = tile_number % PLACES;
            barrier_wait(b.places_full + 8 * from, tile_number / PLACES & 1);
            const u32 current = places[from * TILE + 8 * ((lane & 15) >> 1) + 2 * warp + (lane & 1)];
            __syncwarp();
            if (lane == 0) barrier_arrive(b.places_empty + 8 * from);
#pragma unroll
            for (int quarter = 0; quarter < 4; quarter++) {
                barrier_wait(b.units_empty + 8 * slot, phase);
                const u32 to = base + slot * UNIT + inside;
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    const u32 row = __shfl_sync(FULL, current, 2 * i + (lane >> 4));
                    copy_16_with(to + i * 1024, p.latents + (u64)row * LATENT + 128 * quarter + 8 * (lane & 15), policy);
                }
                passed();
            }
        }
    }
    // The copies of this thread end before it does.
    asm volatile("cp.async.wait_all;" ::: "memory");
}
