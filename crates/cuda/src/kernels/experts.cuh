// What the products of INT4 experts share (compute capability 9.0): layouts, work, unpacking, activation.
//
// Weights: 64 rows by 128 columns are 4224 bytes, eight blocks of 8 rows: `[32 lanes][4 words]`, 8 bf16 scales; word i of lane
// (g, t) holds of row g the columns 32 i + 8 p + 2 t and + 1 as codes p and p + 4, rotated left by two bits. A strip, 64 rows of
// all columns, is one run of memory.
//
// Codes: in bits 2 .. 5 of a half a code is the subnormal code 2^-22, in bits 6 .. 9 it is code 2^-18, so that masking unpacks
// two. Which place a code has depends on its column / 8 being even or odd: tokens are held at four times their value in
// columns of even pieces of eight, at a quarter in the others, and all products have the weight 2^-20.
//
// Tokens: `[columns / 64][slots][64]` halves, 16-byte pieces of slot s at their number ^ (s % 8); an item's slots begin at an
// eighth one (slots.cu).
#define GROUP_BYTES 4224
#define BLOCK_BYTES 528
#define LOW_CODES 0x003c003cu
#define HIGH_CODES 0x03c003c0u
// -8 at the places of low and high codes.
#define LOW_OFFSET 0x80208020u
#define HIGH_OFFSET 0x82008200u

struct Weights {
    const u8 *gate, *up, *down;
};

struct Item {
    u32 expert, first, count;
};

struct Args {
    const Weights *table;
    const Item *items;
    const u32 *item_count;
    const u8 *x;  // tokens
    u8 *y;        // tokens of the next product (SWIGLU), or outputs in slots as tokens lie, at their own value
    int slots, outputs, groups, strips;
    float limit;
    int early;  // the work list was there before the launch in front began
};

DEVICE u32 rotated(u32 w) { return __funnelshift_r(w, w, 8); }

DEVICE uint4 shared_words(u32 address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
    return v;
}

DEVICE void store_words(u32 address, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

DEVICE u16 shared_half(u32 address) {
    u16 v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address));
    return v;
}

DEVICE u32 word_of(const uint4 &v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// What another launch wrote before this one began, past the first-level cache.
DEVICE u32 load_far(const u32 *p) {
    u32 v;
    asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}

DEVICE Item item_at(const Args &p, int i) {
    const u32 *item = (const u32 *)(p.items + i);
    return Item{load_far(item), load_far(item + 1), load_far(item + 2)};
}
