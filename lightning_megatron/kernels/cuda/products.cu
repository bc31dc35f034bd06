// Products in bf16: of a gated feed-forward block with SwiGLU, or its gradient, in them; of a linear layer's gradients. Results
// are rounded where separate passes would round.

// x [M, K], w [2F, K], both [M, 2F], act [M, F]; M % 256 == 0, F % 256 == 0, K % 64 == 0
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1)
    gated_forward(const __grid_constant__ Map x, const __grid_constant__ Map w, const __grid_constant__ Map both, u16* act,
                  int M, int F, int K, int group, int* counters) {
    extern __shared__ __align__(1024) char memory[];
    Memory m = laid_out(memory);
    u32 rank = cluster_rank();
    int rows = M / (2 * ROWS), columns = F / 128;
    auto finish = [&](int warp, int lane) {
        u32 parity = 0;
        for (Tiles t(m); t.tile < rows * columns; t.next(), parity ^= 1) {
            int i, j;
            place(t.tile, rows, columns, group, i, j);
            for (int of = 0; of < 2; of++) {
                int y = (2 * i + rank) * ROWS + of * 64, column = j * 128;
                u32 pieces = m.pieces + of * 4 * PIECE;
                bool sends = warp == 0 && lane == 0;
                barrier_wait(m.given + 8 * of, parity);
                if (sends) send_gate_and_up(&both, F, column, y, pieces);
#pragma unroll 2
                for (int task = 32 * warp + lane; task < 64 * 16; task += 96) {
                    int row = task / 16, chunk = task % 16;
                    u32 gate[4], up[4], made[4];
                    read(chunk_at(pieces, row, chunk), gate);
                    read(chunk_at(pieces, row, chunk + 16), up);
#pragma unroll
                    for (int n = 0; n < 4; n++) {
                        float g0 = low(gate[n]), g1 = high(gate[n]);
                        made[n] = rounded(g0 * sigmoid(g0) * low(up[n]), g1 * sigmoid(g1) * high(up[n]));
                    }
                    store(act + (long long)(y + row) * F + column + chunk * 8, made, FIRST_OUT);
                }
                if (sends) sent<0>();
                __syncwarp();
                if (lane == 0) barrier_arrive(m.taken + 8 * of);
            }
        }
        if (warp == 0 && lane == 0) written();
    };
    run_tiles<0, 0, false, true>(&x, &w, m, rows, columns, group, K / STEP, 128, F, counters, finish);
}

// The gradient of gate and up at 8 columns of a row, by that of the activated; gate and up are written over.
__device__ __forceinline__ void differentiate(u32 (&gate)[4], u32 (&up)[4], const u32 (&of_out)[4]) {
#pragma unroll
    for (int v = 0; v < 4; v++) {
        float made[4];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float g = h ? high(gate[v]) : low(gate[v]), u = h ? high(up[v]) : low(up[v]),
                  o = h ? high(of_out[v]) : low(of_out[v]);
            float s = sigmoid(g);
            made[h] = o * u * s * (1.0f + g * (1.0f - s));
            made[2 + h] = o * g * s;
        }
        gate[v] = rounded(made[0], made[1]);
        up[v] = rounded(made[2], made[3]);
    }
}

// grad [M, K], down [K, F], both and of_both [M, 2F]; M % 256 == 0, F % 256 == 0, K % 64 == 0
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1)
    gated_backward(const __grid_constant__ Map grad, const __grid_constant__ Map down, const u16* both, u16* of_both, int M,
                   int F, int K, int group, int* counters) {
    extern __shared__ __align__(1024) char memory[];
    Memory m = laid_out(memory);
    u32 rank = cluster_rank();
    int rows = M / (2 * ROWS), columns = F / COLUMNS;
    auto finish = [&](int warp, int lane) {
        u32 parity = 0;
        for (Tiles t(m); t.tile < rows * columns; t.next(), parity ^= 1) {
            int i, j;
            place(t.tile, rows, columns, group, i, j);
            long long first = (long long)(2 * i + rank) * ROWS * 2 * F + j * COLUMNS;
            for (int line = 32 * warp + lane; line < ROWS * 8; line += 96)  // 512 bytes of gate and of up a row
                prefetch_line(both + first + (long long)(line / 8) * 2 * F + (line % 8) / 4 * F + line % 4 * 64);
            for (int of = 0; of < 2; of++) {
                u32 pieces = m.pieces + of * 4 * PIECE;
                long long start = first + (long long)of * 64 * 2 * F + lane * 8;
                for (int row = 4 * warp; row < 64; row += 12) {
                    uint4 gates[4], ups[4];
#pragma unroll
                    for (int n = 0; n < 4; n++) {
                        const u16* from = both + start + (long long)(row + n) * 2 * F;
                        gates[n] = fetch(from);
                        ups[n] = fetch(from + F);
                    }
                    __syncwarp();
                    if (row < 12) barrier_wait(m.given + 8 * of, parity);  // gate and up do not depend on what is given
#pragma unroll
                    for (int n = 0; n < 4; n++) {
                        u32 of_out[4], gate[4] = {gates[n].x, gates[n].y, gates[n].z, gates[n].w},
                                       up[4] = {ups[n].x, ups[n].y, ups[n].z, ups[n].w};
                        read(chunk_at(pieces, row + n, lane), of_out);
                        differentiate(gate, up, of_out);
                        u16* to = of_both + start + (long long)(row + n) * 2 * F;
                        store(to, gate, FIRST_OUT);
                        store(to + F, up, FIRST_OUT);
                    }
                }
                __syncwarp();
                if (lane == 0) barrier_arrive(m.taken + 8 * of);
            }
        }
    };
    run_tiles<1, 0, false, true>(&grad, &down, m, rows, columns, group, K / STEP, COLUMNS, 128, counters, finish);
}

// a [M, K], b [K, N], out [M, N]; M % 256 == 0, N % 256 == 0, K % 64 == 0
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1)
    plain_turned(const __grid_constant__ Map a, const __grid_constant__ Map b, const __grid_constant__ Map out, int M, int N,
                 int K, int group, int* counters) {
    extern __shared__ __align__(1024) char memory[];
    Memory m = laid_out(memory, 1);
    u32 rank = cluster_rank();
    int rows = M / (2 * ROWS), columns = N / COLUMNS;
    auto finish = [&](int of, int lane) {  // a warp for each warpgroup
        if (of == 2 || lane) return;
        u32 parity = 0;
        for (Tiles t(m); t.tile < rows * columns; t.next(), parity ^= 1) {
            int i, j;
            place(t.tile, rows, columns, group, i, j);
            barrier_wait(m.given + 8 * of, parity);
            for (int n = 0; n < 4; n++)
                send(&out, j * COLUMNS + n * 64, (2 * i + rank) * ROWS + of * 64, m.pieces + (of * 4 + n) * PIECE);
            sent<0>();
            barrier_arrive(m.taken + 8 * of);
        }
        written();
    };
    run_tiles<1>(&a, &b, m, rows, columns, group, K / STEP, COLUMNS, 128, counters, finish);
}

// a [K, M], b [K, N], total [M, N] in fp32, written or added to; M % 256 == 0, N % 256 == 0, K % 64 == 0
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1)
    weight_gradient(const __grid_constant__ Map a, const __grid_constant__ Map b, const __grid_constant__ Map total, int adds,
                    int M, int N, int K, int group, int* counters) {
    extern __shared__ __align__(1024) char memory[];
    Memory m = laid_out(memory, 1);
    u32 rank = cluster_rank();
    int rows = M / (2 * ROWS), columns = N / COLUMNS;
    auto finish = [&](int of, int lane) {
        if (of == 2 || lane) return;
        for (Tiles t(m); t.tile < rows * columns; t.next()) {
            int i, j;
            place(t.tile, rows, columns, group, i, j);
            for (int half = 0; half < 2; half++) {
                barrier_wait(m.given + 8 * of, half);
                for (int n = 0; n < 4; n++) {
                    int x = j * COLUMNS + half * 128 + n * 32, y = (2 * i + rank) * ROWS + of * 64;
                    u32 from = m.pieces + (of * 4 + n) * PIECE;
                    if (adds) send_to_add(&total, x, y, from);
                    else send(&total, x, y, from);
                }
                sent<0>();
                barrier_arrive(m.taken + 8 * of);
            }
        }
        written();
    };
    run_tiles<1, 1, true>(&a, &b, m, rows, columns, group, K / STEP, COLUMNS, 128, counters, finish);
}

// x [M, K], w [N, K], out [M, N], whose first ``turned`` columns are rotated: see ``finish_rotated``; M % 256 == 0, N % 256 == 0,
// K % 64 == 0
template <int SIZE>
__device__ __forceinline__ void rotated(const Memory& m, const Map* x, const Map* w, const Map* out, const float* cosine,
                                        const float* sine, int turned, int batch, int M, int N, int K, int group,
                                        int* counters) {
    int rows = M / (2 * ROWS), columns = N / COLUMNS;
    auto finish = [&](int warp, int lane) {
        finish_rotated<SIZE>(m, out, cosine, sine, turned, batch, rows, columns, group, warp, lane);
    };
    run_tiles<0>(x, w, m, rows, columns, group, K / STEP, COLUMNS, 128, counters, finish);
}
#define ROTATED(name, size)                                                                                                  \
    extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1)                                       \
        name(const __grid_constant__ Map x, const __grid_constant__ Map w, const __grid_constant__ Map out,                  \
             const float* cosine, const float* sine, int turned, int batch, int M, int N, int K, int group, int* counters) { \
        extern __shared__ __align__(1024) char memory[];                                                                     \
        rotated<size>(laid_out(memory), &x, &w, &out, cosine, sine, turned, batch, M, N, K, group, counters);                \
    }
ROTATED(rotated_64, 64)
ROTATED(rotated_128, 128)
