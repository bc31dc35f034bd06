// Rotary positions on what has been multiplied.

// Pairs of 8 columns, rotated: (a, b) to (a cos - b sin, b cos + a sin), rounded.
__device__ __forceinline__ void rotate(u32 (&a)[4], u32 (&b)[4], const float (&c)[8], const float (&s)[8]) {
#pragma unroll
    for (int v = 0; v < 4; v++) {
        float one[2] = {low(a[v]), high(a[v])}, two[2] = {low(b[v]), high(b[v])}, first[2], second[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            first[h] = fmaf(one[h], c[2 * v + h], two[h] * -s[2 * v + h]);
            second[h] = fmaf(two[h], c[2 * v + h], one[h] * s[2 * v + h]);
        }
        a[v] = rounded(first[0], first[1]);
        b[v] = rounded(second[0], second[1]);
    }
}
__device__ __forceinline__ void eight(const float* p, float (&v)[8]) {
    float4 first = __ldg((const float4*)p), second = __ldg((const float4*)p + 1);
    v[0] = first.x, v[1] = first.y, v[2] = first.z, v[3] = first.w;
    v[4] = second.x, v[5] = second.y, v[6] = second.z, v[7] = second.w;
}

// For ``finish`` of ``run_tiles``: writes out [M, N], whose first ``turned`` columns are heads of SIZE numbers, rotated by the row of
// cosine and sine [M / batch, SIZE] that is row / batch, their two halves alike; turned % 256 == 0.
template <int SIZE>
__device__ __forceinline__ void finish_rotated(const Memory& m, const Map* out, const float* cosine, const float* sine,
                                               int turned, int batch, int rows, int columns, int group, int warp, int lane) {
    constexpr int CHUNKS = SIZE / 16;  // of half of a head
    u32 rank = cluster_rank();
    u32 parity = 0;
    for (Tiles t(m); t.tile < rows * columns; t.next(), parity ^= 1) {
        int i, j;
        place(t.tile, rows, columns, group, i, j);
        for (int of = 0; of < 2; of++) {
            u32 pieces = m.pieces + of * 4 * PIECE;
            int y = (2 * i + rank) * ROWS + of * 64;
            barrier_wait(m.given + 8 * of, parity);
            if (j * COLUMNS < turned) {
                for (int task = 32 * warp + lane; task < 64 * CHUNKS; task += 96) {
                    int row = task / CHUNKS, chunk = task % CHUNKS;
                    long long from = (long long)((y + row) / batch) * SIZE + 8 * chunk;
                    float c[8], s[8];
                    eight(cosine + from, c);
                    eight(sine + from, s);
#pragma unroll
                    for (int head = 0; head < COLUMNS / SIZE; head++) {
                        u32 a[4], b[4], at = chunk_at(pieces, row, head * 2 * CHUNKS + chunk),
                                        behind = chunk_at(pieces, row, head * 2 * CHUNKS + CHUNKS + chunk);
                        read(at, a);
                        read(behind, b);
                        rotate(a, b, c, s);
                        put_chunk(at, a);
                        put_chunk(behind, b);
                    }
                }
                fence_async();
                finishers_sync();
            }
            if (warp == 0 && lane == 0) {
                for (int n = 0; n < 4; n++) send(out, j * COLUMNS + n * 64, y, pieces + n * PIECE);
                sent<0>();
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(m.taken + 8 * of);
        }
    }
    if (warp == 0 && lane == 0) written();
}
