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

// Descriptor of `b` at a shared address; 16 columns of `a` further are 2 more.
DEVICE u64 describe(u32 address) { return (u64)((address & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62; }

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


template <>
struct Warpgroup<8> {
    static __device__ __forceinline__ void multiply(float *c, const u32 *a, u64 b, int add) {
        asm volatile(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %9, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, p, 1, 1, 0;\n}\n"
            : C4(0)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
    }
};

template <>
struct Warpgroup<16> {
    static __device__ __forceinline__ void multiply(float *c, const u32 *a, u64 b, int add) {
        asm volatile(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %13, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 "
            "{%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12, p, 1, 1, 0;\n}\n"
            : C8(0)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
    }
};

template <>
struct Warpgroup<32> {
    static __device__ __forceinline__ void multiply(float *c, const u32 *a, u64 b, int add) {
        asm volatile(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
            "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19}, %20, p, 1, 1, 0;\n}\n"
            : C16(0)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
    }
};

template <int ACROSS>
struct Warpgroup<64, ACROSS> {
    static __device__ __forceinline__ void multiply(float *c, const u32 *a, u64 b, int add) {
        asm volatile(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
            "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
            "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, p, 1, 1, %38;\n}\n"
            : C32(0)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(ACROSS));
    }
};

template <int ACROSS>
struct Warpgroup<128, ACROSS> {
    static __device__ __forceinline__ void multiply(float *c, const u32 *a, u64 b, int add) {
        asm volatile(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
            "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
            "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "
            "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "
            "%62, %63}, {%64, %65, %66, %67}, %68, p, 1, 1, %70;\n}\n"
            : C32(0), C32(32)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(ACROSS));
    }
};
