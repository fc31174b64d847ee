// Warpgroup products (compute capability 9.0): c += a b with a 64 x 16 in registers, b 16 x N halves in shared memory, c in f32.
//
// Warp w of the four holds the rows 16 w .. of `a` and `c`, as `mma` does (common.cuh). `b` lies as N rows (columns of the
// product) of 128 bytes in atoms of eight rows; 16-byte pieces of row r are at their number ^ (r % 8).
// A product runs on after the instruction: until `products_done` its registers must be left alone.

DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most LEFT committed batches run.
template <int LEFT>
DEVICE void products_done() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// Descriptor of `b` at a shared address; 16 columns of `a` further are 2 more. Its lower word alone moves with the address.
DEVICE u32 describe_low(u32 address) { return (address & 0x3ffff) >> 4 | 1u << 16; }
DEVICE u64 describe_at(u32 low) { return (u64)low | 64ull << 32 | 1ull << 62; }
DEVICE u64 describe(u32 address) { return describe_at(describe_low(address)); }

// ACROSS: `b` is stored depth by columns, 64 of them in a piece; 16 rows of the depth further are 128 more.
// Its pieces of 64 columns are `apart` bytes from each other.
DEVICE u64 describe_across(u32 address, u32 apart) { return (u64)((address & 0x3ffff) >> 4) | (u64)(apart >> 4) << 16 | 64ull << 32 | 1ull << 62; }

template <int N, int ACROSS = 0>
struct Warpgroup;

// Uses of sums stay behind this; for sums that a loop carries on.
template <int N>
DEVICE void hold(float (&c)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(c[i])::"memory");
}

#define C4(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define C8(i) C4(i), C4(i + 4)
#define C16(i) C8(i), C8(i + 8)
#define C32(i) C16(i), C16(i + 16)


#define LIST_4 "%0, %1, %2, %3"
#define LIST_8 LIST_4 ", %4, %5, %6, %7"
#define LIST_12 LIST_8 ", %8, %9, %10, %11"
#define LIST_16 LIST_12 ", %12, %13, %14, %15"
#define LIST_20 LIST_16 ", %16, %17, %18, %19"
#define LIST_24 LIST_20 ", %20, %21, %22, %23"
#define LIST_28 LIST_24 ", %24, %25, %26, %27"
#define LIST_32 LIST_28 ", %28, %29, %30, %31"
#define LIST_36 LIST_32 ", %32, %33, %34, %35"
#define LIST_40 LIST_36 ", %36, %37, %38, %39"
#define LIST_44 LIST_40 ", %40, %41, %42, %43"
#define LIST_48 LIST_44 ", %44, %45, %46, %47"
#define LIST_52 LIST_48 ", %48, %49, %50, %51"
#define LIST_56 LIST_52 ", %52, %53, %54, %55"
#define LIST_60 LIST_56 ", %56, %57, %58, %59"
#define LIST_64 LIST_60 ", %60, %61, %62, %63"

// LIST and the last arguments name the N / 2 sums of a thread; A0 .. A3, B, P, T are the numbers of the operands behind them.
#define WARPGROUP_PRODUCT(N, LIST, A0, A1, A2, A3, B, P, T, ...)                                                         \
    template <int ACROSS>                                                                                              \
    struct Warpgroup<N, ACROSS> {                                                                                      \
        static __device__ __forceinline__ void multiply(float *c, const u32 *a, u64 b, int add) {                      \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" P ", 0;\n"                                               \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" LIST "}, {%" A0 ", %" A1 ", %" A2  \
                         ", %" A3 "}, %" B ", p, 1, 1, %" T ";\n}\n"                                                   \
                         : __VA_ARGS__                                                                                 \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(ACROSS));                 \
        }                                                                                                              \
    };

WARPGROUP_PRODUCT(8, LIST_4, "4", "5", "6", "7", "8", "9", "10", C4(0))
WARPGROUP_PRODUCT(16, LIST_8, "8", "9", "10", "11", "12", "13", "14", C8(0))
WARPGROUP_PRODUCT(24, LIST_12, "12", "13", "14", "15", "16", "17", "18", C8(0), C4(8))
WARPGROUP_PRODUCT(32, LIST_16, "16", "17", "18", "19", "20", "21", "22", C16(0))
WARPGROUP_PRODUCT(48, LIST_24, "24", "25", "26", "27", "28", "29", "30", C16(0), C8(16))
WARPGROUP_PRODUCT(56, LIST_28, "28", "29", "30", "31", "32", "33", "34", C16(0), C8(16), C4(24))
WARPGROUP_PRODUCT(64, LIST_32, "32", "33", "34", "35", "36", "37", "38", C32(0))
WARPGROUP_PRODUCT(80, LIST_40, "40", "41", "42", "43", "44", "45", "46", C32(0), C8(32))
WARPGROUP_PRODUCT(96, LIST_48, "48", "49", "50", "51", "52", "53", "54", C32(0), C16(32))
WARPGROUP_PRODUCT(112, LIST_56, "56", "57", "58", "59", "60", "61", "62", C32(0), C16(32), C8(48))
WARPGROUP_PRODUCT(120, LIST_60, "60", "61", "62", "63", "64", "65", "66", C32(0), C16(32), C8(48), C4(56))
WARPGROUP_PRODUCT(128, LIST_64, "64", "65", "66", "67", "68", "69", "70", C32(0), C32(32))
