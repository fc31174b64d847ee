// What the pipelined delta rule knows of its rows: how it cuts them into batches, and the cursor that goes through a block's heads
// of segments and the records and rows of each.

// States and batches that are on their way; a batch is at most one record to fold in and BATCH rows behind it.
#define BUFFERS 2
#ifndef PRODUCERS
#define PRODUCERS 2
#endif
#define BATCH 3
// Rows of raw columns of a batch: those in front that the convolution needs, too.
#define WINDOW (TAPS - 1 + BATCH)
#define CONSTANTS (3 * TAPS + 1)
#define FIRST 1
#define FRESH 2
#define END 4

// What is known of a batch: its head of a slot, its first row of the step and that one's position.
struct Plan {
    u32 flags, row, unit;
    int head, position, folds, rows;
    // The state is kept behind so many tokens of the batch (with a record before the rows); -1: not here.
    int save;
    // Its rows from which on they leave records and raw columns in the rings; how many raw columns it lacks in front of position 0;
    // the number of its first row in the segment.
    int keep, columns, missing, first;
};
#define PLAN_WORDS 12

// What comes from memory for a batch: raw columns, f and z of its rows, the record, four numbers each of which one is beta's.
struct Coming {
    float raw[WINDOW][3][DIM], gates[BATCH][2][DIM], record[3][DIM], beta[BATCH][4];
    Plan plan;
};

// A row, prepared, and what the warps leave of it: sums of the output over the keys of each warp of a group, and its update.
struct Row {
    float q[DIM], k[DIM], v[DIM], decay[DIM], factor[DIM], update[DIM], o[GROUPS][DIM];
};
struct Batch {
    Row rows[BATCH];
    // Key, decay, update.
    float record[3][DIM], beta[4], product[4];
    Plan plan;
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
    // The next batch, from `index` on.
    __device__ Plan plan(const Ring &ring) const {
        Plan b;
        b.folds = index < w.fold;
        const int t = w.from + index + b.folds - w.fold;
        b.rows = t < w.from ? 0 : min_of(BATCH, w.to - t);
        b.flags = (index == 0 ? FIRST : 0) | (w.fresh ? FRESH : 0);
        b.row = s.first_row + t;
        b.unit = unit();
        b.head = head;
        b.position = s.position + t;
        // Folded rows are committed even when no row of this step is.
        b.save = -1;
        if (b.folds && index + 1 == w.fold && w.save == w.from) b.save = 0;
        else if (w.save > t && w.save <= t + b.rows) b.save = w.save - t;
        b.keep = (int)s.commit - t;
        b.columns = (int)s.rows - ring.column_ring - t;
        b.missing = TAPS - 1 - b.position;
        b.first = t;
        return b;
    }
    __device__ u32 unit() const { return s.slot * heads + head; }
};
