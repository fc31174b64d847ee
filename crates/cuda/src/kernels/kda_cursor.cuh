// What the pipelined delta rule knows of its rows: slots of rows, tokens asked for, and the cursor that goes through a block's
// heads of segments and the records and rows of each.

// Rows that are prepared or in work, states that are on their way.
#define SLOTS 6
#define BUFFERS 2
#ifndef PRODUCERS
#define PRODUCERS 2
#endif
// Tokens (rows or records) that a group of producers has asked for ahead of the one it prepares, and numbers of each thread.
#define AHEAD 2
#define NUMBERS (3 * TAPS + 3)
#define CONSTANTS (3 * TAPS + 1)
#define FOLD 1
#define SAVE 2
#define FIRST 4
#define FRESH 8
#define END 16

// A row, prepared, and what the warps leave of it; or a record to fold in (key, decay, update).
struct Row {
    float qkv[3][DIM], decay[DIM], factor[DIM], update[DIM], raw[3][DIM];
    // Sums of the output over the keys of each warp of a group.
    float o[GROUPS][DIM];
    float beta, product;
    u32 flags, row, unit;
    // Places in the rings, or -1.
    int record, column, pad;
};

// What is known of a token that has been asked for.
struct Token {
    u32 flags, row, unit;
    int record, column, head;
};

// The rows of a segment that a launch does: records to fold, rows [from, to), the state kept behind `save` rows.
struct Work {
    int fold, from, to, save;
    bool fresh;
};
DEVICE Work work_of(const Segment &s, int part) {
    Work w = {(int)s.fold, 0, (int)s.rows, (int)s.commit, s.position == s.fold};
    if (part > 0) {
        const Chunks c = chunks_of(s);
        if (part == 1 && c.count > 0) w.to = w.save = c.first;
        if (part == 2) {
            w.from = c.count > 0 ? c.first + CHUNK * c.count : w.to;
            w.fold = 0;
            w.fresh = false;
            if (w.from == w.save) w.save = -1;
        }
    }
    return w;
}

// The heads of segments of a block in turn, and the records and rows of each.
struct Cursor {
    const Segment *segments;
    u32 heads, magic;
    int part, items, item, index, count, head;
    Segment s;
    Work w;
    __device__ Cursor(const Segment *list, int h, u32 by, int p, int n)
        : segments(list), heads(h), magic(by), part(p), items(n) {
        item = blockIdx.x;
        index = 0;
        find();
    }
    // The first item from here on that has something to do.
    __device__ void find() {
        for (; item < items; item += gridDim.x) {
            const u32 segment = quotient(item, heads, magic);
            head = item - segment * heads;
            s = segments[segment];
            asm volatile("prefetch.global.L1 [%0];" ::"l"(segments + segment + gridDim.x / heads) : "memory");
            w = work_of(s, part);
            count = w.fold + w.to - w.from;
            if (count > 0) return;
        }
    }
    __device__ void next_item() {
        item += gridDim.x;
        find();
    }
    __device__ void advance(int by) {
        index += by;
        while (item < items && index >= count) {
            index -= count;
            next_item();
        }
    }
    __device__ bool more() const { return item < items; }
    __device__ u32 unit() const { return s.slot * heads + head; }
};
