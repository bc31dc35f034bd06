// The forward product of a gated feed-forward block in 8 bits, e4m3 by one factor a matrix, with SwiGLU in it, rounded to e4m3 in
// both forms that products want. What two separate passes would round is rounded here, so results are theirs.

// SwiGLU of 8 columns of a row: their bytes.
__device__ __forceinline__ void activate(const u32 (&gate)[4], const u32 (&up)[4], float factor, float& largest,
                                         u32 (&bytes)[2]) {
    float made[8];
#pragma unroll
    for (int n = 0; n < 8; n++) {
        float g = n & 1 ? high(gate[n / 2]) : low(gate[n / 2]), u = n & 1 ? high(up[n / 2]) : low(up[n / 2]);
        float value = g * sigmoid_as_triton(g) * u;
        largest = fmaxf(largest, fabsf(value));
        made[n] = value * factor;
    }
    bytes[0] = narrowed(made[0], made[1], made[2], made[3]);
    bytes[1] = narrowed(made[4], made[5], made[6], made[7]);
}
// Four words of four bytes, turned: word n holds the nth byte of each.
__device__ __forceinline__ void turn(u32 a, u32 b, u32 c, u32 d, u32 (&words)[4]) {
    u32 first = __byte_perm(a, b, 0x5140), second = __byte_perm(c, d, 0x5140), third = __byte_perm(a, b, 0x7362),
        fourth = __byte_perm(c, d, 0x7362);
    words[0] = __byte_perm(first, second, 0x5410);
    words[1] = __byte_perm(first, second, 0x7632);
    words[2] = __byte_perm(third, fourth, 0x5410);
    words[3] = __byte_perm(third, fourth, 0x7632);
}
// Of 64 tokens and 128 columns handed over a warp takes 32 by 32 at a time, a lane 4 tokens by 8 columns. So each store of the warp
// fills sectors of 32 bytes, 8 of rows (a token of each lane) or 4 of columns (a column of each), and eight lanes next to each other
// read what lies in different banks: 4 chunks of two rows that are 4 apart.
__device__ __forceinline__ void activate_block(u32 pieces, int block, int lane, float factor, float& largest,
                                               unsigned char* rows, unsigned char* columns, int M, int F) {
    int token = block % 2 * 32 + lane / 4 * 4, chunk = block / 2 * 4 + lane % 4;
    u32 bytes[4][2];
    unsigned char* to = rows + (long long)token * F + chunk * 8;
#pragma unroll
    for (int t = 0; t < 4; t++, to += F) {
        u32 gate[4], up[4];
        read(chunk_at(pieces, token + t, chunk), gate);
        read(chunk_at(pieces, token + t, chunk + 16), up);
        activate(gate, up, factor, largest, bytes[t]);
        store_two(to, bytes[t]);
    }
    to = columns + (long long)(chunk * 8) * M + token;
#pragma unroll
    for (int n = 0; n < 2; n++) {
        u32 words[4];
        turn(bytes[0][n], bytes[1][n], bytes[2][n], bytes[3][n], words);
#pragma unroll
        for (int c = 0; c < 4; c++, to += M) store_one(to, words[c]);
    }
}

// x [M, K], w [2F, K], both [M, 2F], rows [M, F], columns [F, M]; M % 256 == 0, F % 128 == 0, K % 128 == 0. Maps of x and w take
// bytes two by two. The activated is multiplied by scale, its largest magnitude raises amax; who guesses the scale notes it behind
// the inverse.
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1)
    gated_narrow_forward(const __grid_constant__ Map x, const __grid_constant__ Map w, const __grid_constant__ Map both,
                         const float* x_inverse, const float* w_inverse, unsigned char* act_rows, unsigned char* act_columns,
                         float* inverse, const float* scale, int* amax, int guesses, int M, int F, int K, int group,
                         int* counters) {
    extern __shared__ __align__(1024) char memory[];
    Memory m = laid_out(memory);
    u32 rank = cluster_rank();
    int rows = M / (2 * ROWS), columns = F / 128;
    auto finish = [&](int warp, int lane) {
        float factor = *scale, largest = 0.0f;
        bool sends = warp == 0 && lane == 0;
        if (guesses && sends && blockIdx.x == 0) inverse[1] = factor;
        u32 parity = 0;
        for (Tiles t(m); t.tile < rows * columns; t.next(), parity ^= 1) {
            int i, j;
            place(t.tile, rows, columns, group, i, j);
            for (int of = 0; of < 2; of++) {
                int y = (2 * i + rank) * ROWS + of * 64, column = j * 128;
                u32 pieces = m.pieces + of * 4 * PIECE;
                barrier_wait(m.given + 8 * of, parity);
                if (sends) send_gate_and_up(&both, F, column, y, pieces);
                __syncwarp();
                unsigned char *to_rows = act_rows + (long long)y * F + column,
                              *to_columns = act_columns + (long long)column * M + y;
                for (int block = warp; block < 8; block += 3)
                    activate_block(pieces, block, lane, factor, largest, to_rows, to_columns, M, F);
                if (sends) sent<0>();
                __syncwarp();
                if (lane == 0) barrier_arrive(m.taken + 8 * of);
            }
        }
        u32 most = __reduce_max_sync(0xFFFFFFFFu, __float_as_uint(largest));  // not negative, so ordered as their bits are
        if (lane == 0) atomicMax(amax, (int)most);
        if (sends) written();
    };
    run_narrow_tiles<true>(&x, &w, m, *x_inverse * *w_inverse, rows, columns, group, K / LINE, 128, F, counters, finish);
}
