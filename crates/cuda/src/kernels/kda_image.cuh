// A chunk of a head as the walk takes it (its image), and where its preparation keeps things in shared memory.
//
// The image is what bulk copies carry between blocks, in bytes from a multiple of 1024 on. Pieces are 64 rows of 64 halves, in
// which the 16-byte part c of row r is at c ^ (r % 8), as warpgroup products read them; a matrix of 128 channels is two pieces
// that are PIECE apart, so that those of WEIGHT and QUERY are one operand.
//   WEIGHT  -W    QUERY  q exp(G)    KEY  k exp(G_63 - G)    UPDATE  U    PAIRS  P [64][64]    DECAY  exp(G_63) [DIM] in f32
// Before they are what they are, QUERY holds q, WEIGHT k, UPDATE v, KEY keys that decay to the end of their block of 16 rows.
#define PIECE 16384
#define WEIGHT 0
#define QUERY 8192
#define KEY 32768
#define UPDATE 40960
#define PAIRS 65536
#define DECAY 73728
#define IMAGE_BYTES 74752
// Behind it: exp(G) from the beginning of a block of 16 rows on, [64][DIM] f32, 16-byte part c of row r at c ^ 2 (r % 4); decay of
// whole blocks [4][DIM] in f32 and as halves, of the blocks behind a block as halves; squares of q and k of two halves of the
// channels, scales of q and k, beta, each [64].
#define DECAYS IMAGE_BYTES
#define TOTALS (DECAYS + 32768)
#define TOTAL_HALVES (TOTALS + 4 * DIM * 4)
#define BEHIND_HALVES (TOTAL_HALVES + 4 * DIM * 2)
#define SQUARES (BEHIND_HALVES + 4 * DIM * 2)
#define SCALES (SQUARES + 4 * CHUNK * 4)
#define BETA (SCALES + 2 * CHUNK * 4)
#define TEAM_BYTES 113664
// Where the decays were: shares of sums that two warps give each other; blocks of A below the diagonal [6] as halves (rows of 48
// bytes), on the diagonal [4] in f32; inverses [4] as halves (rows of 48 bytes).
#define SHARES DECAYS
#define LOWER (DECAYS + 20480)
#define DIAGONAL (LOWER + 6 * 768)
#define INVERSE (DIAGONAL + 4 * 1024)

#define LOG2E 1.4426950408889634f

// What the stage is given.
struct Args {
    const Segment *segments;
    const float *proj, *gates;
    const u8 *taps;
    const float *a_log, *dt_bias, *weight;
    float *out;
    // Tasks taken; 32 words further images taken, [walkers]; number of the image in each place, [walkers][PLACES]. Zero.
    u32 *counters;
    // [PLACES][walkers] images.
    u8 *images;
    Ring ring;
    int segment_count, proj_stride, gates_stride, out_stride, bf16, taps_pitch, heads, walkers;
    float bound, eps;
};
