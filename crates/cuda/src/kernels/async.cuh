// Copies that run beside the threads, barriers that count them, and warpgroup products with both operands in shared memory
// (compute capability 9.0).
//
// An operand lies in pieces of 64 halves wide: rows of 128 bytes, in which the 16-byte chunk c of row r is at c ^ (r % 8). With
// `describe` such a piece is rows by depth (depth contiguous); with ACROSS = 1 the same bytes are read as depth by rows.

DEVICE u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }

DEVICE void barrier_init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

DEVICE void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@done bra over;\nbra again;\n"
        "over:\n}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

DEVICE void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

DEVICE void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Bytes to shared memory by the copy engine, counted by a barrier; multiples of 16.
DEVICE void copy_bulk(u32 to, const void *from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

// 16 bytes to shared memory by a thread, past the first-level cache; `copies_arrive` lets a barrier count all of the thread's.
DEVICE void copy_16(u32 to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
DEVICE void copies_arrive(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// What this thread wrote, or knows to be written, is seen by products and copies.
DEVICE void shared_written() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Some of a block's threads meet.
DEVICE void meet(int barrier, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory"); }

// c += a b, a 64 x 16 and b 16 x N halves, both described; ACROSS: `a` is stored depth by rows.
template <int N, int ACROSS>
struct SharedProduct;

#define SHARED_PRODUCT(N, LIST, C, A, B, P)                                                                             \
    template <int ACROSS>                                                                                              \
    struct SharedProduct<N, ACROSS> {                                                                                  \
        static __device__ __forceinline__ void multiply(float *c, u64 a, u64 b, int add) {                             \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" P ", 0;\n"                                               \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" LIST "}, %" A ", %" B              \
                         ", p, 1, 1, %" C ", 0;\n}\n"                                                                  \
                         : SHARED_SUMS_##N                                                                             \
                         : "l"(a), "l"(b), "r"(add), "n"(ACROSS));                                                     \
        }                                                                                                              \
    };

#define SHARED_SUMS_8 C4(0)
#define SHARED_SUMS_16 C8(0)
#define SHARED_SUMS_32 C16(0)
#define SHARED_SUMS_128 C32(0), C32(32)

SHARED_PRODUCT(8, LIST_4, "7", "4", "5", "6")
SHARED_PRODUCT(16, LIST_8, "11", "8", "9", "10")
SHARED_PRODUCT(32, LIST_16, "19", "16", "17", "18")
SHARED_PRODUCT(128, LIST_64, "67", "64", "65", "66")
