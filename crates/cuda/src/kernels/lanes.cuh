// Many sums over the lanes of a warp at once.

// Of 2 D numbers of each lane, lanes whose number has the bit D keep the upper half and the others the lower, plus the same ones
// of the lane that differs in that bit. From D = 16, 8, ... on down, 32 numbers of each lane become sums of the warp: lane l has
// that of number l. The tree is the same for all of them.
template <int D, int N>
DEVICE void halve(float (&s)[N]) {
    const bool upper = threadIdx.x & D;
#pragma unroll
    for (int i = 0; i < D; i++) {
        const float give = upper ? s[i] : s[i + D], keep = upper ? s[i + D] : s[i];
        s[i] = keep + __shfl_xor_sync(FULL, give, D);
    }
}
