// What both forms of Kimi delta attention share. DIM: width of a head.
#include "common.cuh"

// Rows of a chunk.
#define CHUNK 64

struct Ring {
    float *state, *records, *columns;
    // Entries, and ceil(2^32 / entries) of records, columns and heads, by which remainders take a multiplication.
    int record_ring, column_ring;
    u32 record_magic, column_magic, head_magic;
};
// n / d and n % d for n d below 2^32.
DEVICE u32 quotient(u32 n, u32 d, u32 magic) { return d == 1 ? n : __umulhi(n, magic); }
DEVICE u32 remainder(u32 n, u32 d, u32 magic) { return n - quotient(n, d, magic) * d; }
DEVICE int record_at(const Ring &ring, int p) { return remainder(p, ring.record_ring, ring.record_magic); }
DEVICE int column_at(const Ring &ring, int p) { return remainder(p, ring.column_ring, ring.column_magic); }

// Exponential, inverse and root to two units in the last place.
DEVICE float quick_exp(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.4426950408889634f));
    return y;
}
DEVICE float quick_inverse(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float quick_inverse_root(float x) {
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float quick_sigmoid(float x) { return quick_inverse(1.0f + quick_exp(-x)); }

// Where whole chunks begin and how many there are: chunks of CHUNK rows at multiples of CHUNK from position 0, committed ones.
struct Chunks {
    int first, count;
};
DEVICE Chunks chunks_of(const Segment &s) {
    const int first = (CHUNK - (int)(s.position % CHUNK)) % CHUNK;
    return {first, first < (int)s.commit ? ((int)s.commit - first) / CHUNK : 0};
}
