// Products of numbers of 8 bits, e4m3 by one factor a matrix, K last in both.

// As ``product``: a stage holds 128 numbers of a row, of which one instruction takes 32, which are 32 bytes as 16 wider ones are.
// Sums stay in the tensor cores, which keep fewer bits than fp32: what others call fast accumulation.
__device__ __forceinline__ void product_narrow(float (&d)[128], u32 a, u32 b, u32 full, u32 empty, Turn& turn, int steps,
                                               bool signals, u32 signal_to) {
    int before = 0;
    for (int step = 0; step < steps; step++) {
        barrier_wait(full + 8 * turn.stage, turn.phase);
        u64 at_a = described(a + turn.stage * A_BYTES, SWIZZLED | (1ull << 16));
        u64 at_b = described(b + turn.stage * B_BYTES, SWIZZLED | (1ull << 16));
        multiplies_begin();
#pragma unroll
        for (int k = 0; k < LINE / 32; k++) multiply_narrow(d, at_a + 2 * k, at_b + 2 * k, step > 0 || k > 0);
        multiplies_commit();
        multiplies_wait<1>();
        if (step > 0 && signals) barrier_arrive_at(empty + 8 * before, signal_to);
        before = turn.stage;
        turn.next<STAGES>();
    }
    multiplies_wait<0>();
    if (signals) barrier_arrive_at(empty + 8 * before, signal_to);
}

// As ``hand_over``, times a factor.
__device__ __forceinline__ void hand_over_times(float (&d)[128], float factor, u32 pieces, int thread, u32 taken, u32 parity,
                                                u32 given) {
    barrier_wait(taken, parity);
#pragma unroll
    for (int c = 0; c < 32; c += 2) {
        int i = 4 * c;
        put(matrix_row(pieces + c / 8 * PIECE, thread, c % 8), rounded(d[i] * factor, d[i + 1] * factor),
            rounded(d[i + 2] * factor, d[i + 3] * factor), rounded(d[i + 4] * factor, d[i + 5] * factor),
            rounded(d[i + 6] * factor, d[i + 7] * factor));
    }
    fence_async();
    __syncwarp();
    if ((thread & 31) == 0) barrier_arrive(given);
}

// As ``run_tiles``; what is handed over is the product times ``factor``, rounded.
template <bool KEEPS, class Finish>
__device__ __forceinline__ void run_narrow_tiles(const Map* first, const Map* second, const Memory& m, float factor, int rows,
                                                 int columns, int group, int steps, int width, int half, int* counters,
                                                 Finish finish) {
    int warp = threadIdx.x / 32;
    if (warp < 8) {
        more_registers<200>();
        int thread = threadIdx.x & 127, who = threadIdx.x >> 7;
        Turn turn;
        u32 parity = 1;
        float d[128];
        for (Tiles t(m); t.tile < rows * columns; t.next(), parity ^= 1) {
            product_narrow(d, m.a + who * (A_BYTES / 2), m.b, m.full, m.empty, turn, steps, thread < 2, thread & 1);
            hand_over_times(d, factor, m.pieces + who * 4 * PIECE, thread, m.taken + 8 * who, parity, m.given + 8 * who);
        }
    } else {
        fewer_registers<104>();
        if (warp == 8) load_tiles<0, 0, KEEPS>(first, second, m, rows, columns, group, steps, width, half, counters);
        else finish(warp - 9, threadIdx.x & 31);
    }
    __syncwarp();
    cluster_sync();
}
