// The projection to queries, keys and values in 8 bits, with the rotation of queries and keys in it.

// x [M, K], w [N, K], out [M, N] in bf16, whose first ``turned`` columns are rotated: see ``finish_rotated``; M % 256 == 0,
// N % 256 == 0, K % 128 == 0. Maps of x and w take bytes two by two.
template <int SIZE>
__device__ __forceinline__ void rotated_narrow(const Memory& m, const Map* x, const Map* w, const Map* out, float factor,
                                               const float* cosine, const float* sine, int turned, int batch, int M, int N,
                                               int K, int group, int* counters) {
    int rows = M / (2 * ROWS), columns = N / COLUMNS;
    auto finish = [&](int warp, int lane) {
        finish_rotated<SIZE>(m, out, cosine, sine, turned, batch, rows, columns, group, warp, lane);
    };
    run_narrow_tiles<true>(x, w, m, factor, rows, columns, group, K / LINE, COLUMNS, 128, counters, finish);
}
#define ROTATED_NARROW(name, size)                                                                                           \
    extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1)                                       \
        name(const __grid_constant__ Map x, const __grid_constant__ Map w, const __grid_constant__ Map out,                  \
             const float* x_inverse, const float* w_inverse, const float* cosine, const float* sine, int turned, int batch,  \
             int M, int N, int K, int group, int* counters) {                                                                \
        extern __shared__ __align__(1024) char memory[];                                                                     \
        float factor = *x_inverse * *w_inverse;                                                                              \
        rotated_narrow<size>(laid_out(memory), &x, &w, &out, factor, cosine, sine, turned, batch, M, N, K, group, counters); \
    }
ROTATED_NARROW(rotated_narrow_64, 64)
ROTATED_NARROW(rotated_narrow_128, 128)
