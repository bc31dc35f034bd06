// Losses of rows of logits and their gradient, written over them, with each row on chip meanwhile: one read and one write of memory.
//
// A cluster of four programs takes a row, each a quarter. One thread copies quarters to and from three buffers, so that the next two
// rows are on their way while one is worked on; fifteen warps take a quarter out of its buffer once. What a thread has taken it keeps
// as powers of two below its own largest, and these become the gradient by one factor: an exponential an element, not two.
//
// Each warp sends its (largest, sum) to every program of the cluster, where data and signal arrive together; all warps join the 60 of
// them in the same order, so all have the same bits. Two sets of cells are enough: who sends for row k + 2 has had all warps' news of
// row k + 1, and each warp sent that after it had read the cells of row k.
constexpr int PARTS = 4;  // programs of a cluster
constexpr int WORKERS = 480,
              WARPS = WORKERS / 32;  // threads that compute; one more warp copies: 16 have 128 registers a thread, 17 had 96
constexpr int EACH = 9;              // pieces of 16 bytes of a row that a thread holds
constexpr int HOLDS = 3, HOLD_BYTES = WORKERS * EACH * 16;
constexpr int CELLS = PARTS * WARPS, CELLS_BYTES = CELLS * 16;
constexpr u32 NOTHING = 0xFF80FF80u;  // -inf, twice
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;

__device__ __forceinline__ float lowest() { return __uint_as_float(0xFF800000u); }
__device__ __forceinline__ float or_zero(float top) { return top == lowest() ? 0.0f : top; }  // -inf - -inf would be NaN
__device__ __forceinline__ float largest_of_warp(float x) {
#pragma unroll
    for (int n = 16; n; n /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, n));
    return x;
}
__device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
    for (int n = 16; n; n /= 2) x += __shfl_xor_sync(~0u, x, n);
    return x;
}

struct Given {
    u16* logits;  // [num, columns]
    const long long* labels;
    float* losses;
    int num, columns;
    long long ignored;
    float of_target, of_all, of_square;
};
struct Part {
    int first, pieces, real;
};  // of a row: its first column, how many pieces of 8 columns, how many columns count
struct Held {
    u32 holds, cells, full, done, joined;
};
struct Sums {
    float top, total, summed;
};  // largest times LOG2E; the sum of powers below it; the sum of what counts

__device__ __forceinline__ Held held_in(char* memory) {
    u32 holds = (address(memory) + 127) & ~127u, cells = holds + HOLDS * HOLD_BYTES, full = cells + 2 * CELLS_BYTES;
    Held m = {holds, cells, full, full + 8 * HOLDS, full + 16 * HOLDS};
    if (threadIdx.x == 0) {
        for (int n = 0; n < HOLDS; n++) {
            barrier_init(m.full + 8 * n, 1);
            barrier_init(m.done + 8 * n, WARPS);
        }
        for (int n = 0; n < 2; n++) barrier_init(m.joined + 8 * n, 1);
        barriers_made();
        for (int n = 0; n < 2; n++) barrier_expect(m.joined + 8 * n, CELLS_BYTES);
    }
    cluster_sync();
    return m;
}

__device__ __forceinline__ Part part_of(int columns, int num_real, int rank) {
    int pieces = columns / 8, most = (pieces + PARTS - 1) / PARTS, first = min(rank * most, pieces),
        count = min(most, pieces - first);
    return {8 * first, count, max(0, min(num_real - 8 * first, 8 * count))};
}

// One thread. Rows that do not count are not read, only told of.
__device__ __forceinline__ void move_rows(const Given& g, const Held& m, const Part& part, int most_bytes) {
    u64 policy = used_once();
    int stride = gridDim.x / PARTS;
    u32 bytes = 16 * part.pieces;
    auto begin = [&](int row, long long label, int hold) {
        u32 there = m.full + 8 * hold, to = m.holds + hold * HOLD_BYTES;
        if (label == g.ignored || bytes == 0) {
            barrier_arrive(there);
            return;
        }
        barrier_expect(there, bytes);
        const char* from = (const char*)(g.logits + (long long)row * g.columns + part.first);
        for (u32 at = 0; at < bytes; at += most_bytes)
            copy_in(to + at, from + at, min((u32)most_bytes, bytes - at), there, policy);
    };
    int row = blockIdx.x / PARTS, ahead = row;
    for (int n = 0; n < HOLDS && ahead < g.num; n++, ahead += stride) begin(ahead, label_at(g.labels + ahead), n);
    long long next = ahead < g.num ? label_at(g.labels + ahead) : 0;
    Turn turn;
    for (; row < g.num; row += stride, ahead += stride) {
        barrier_wait(m.done + 8 * turn.stage, turn.phase);
        char* to = (char*)(g.logits + (long long)row * g.columns + part.first);
        u32 from = m.holds + turn.stage * HOLD_BYTES;
        for (u32 at = 0; at < bytes; at += most_bytes) copy_out(to + at, from + at, min((u32)most_bytes, bytes - at), policy);
        copies_commit();
        if (ahead < g.num) {
            sent<0>();
            begin(ahead, next, turn.stage);
            if (ahead + stride < g.num) next = label_at(g.labels + ahead + stride);
        }
        turn.next<HOLDS>();
    }
    written();
}

// Whose piece the last column that counts is in, with others behind it that do not.
__device__ __forceinline__ bool at_edge(const Part& part) {
    return part.real % 8 && part.real / 8 % WORKERS == (int)threadIdx.x;
}

// A thread's share of a row out of a buffer: pieces WORKERS apart. Columns of the edge's piece that do not count have become -inf.
template <bool SMOOTHS>
__device__ __forceinline__ Sums take(u32 hold, const Part& part, float (&powers)[8 * EACH]) {
    u32 words[EACH][4], most = NOTHING;
    float summed = 0.0f;
    if (at_edge(part)) {
        for (int column = part.real & ~7; column < part.real; column++) summed += low(read_one(hold + 2 * column));
        for (int column = part.real; column % 8; column++) write_one(hold + 2 * column, NOTHING);
    }
#pragma unroll
    for (int v = 0; v < EACH; v++) {
        int piece = threadIdx.x + v * WORKERS;
#pragma unroll
        for (int n = 0; n < 4; n++) words[v][n] = NOTHING;
        if (8 * piece < part.real) read(hold + 16 * piece, words[v]);
    }
#pragma unroll
    for (int n = 0; n < 4 * EACH; n++) most = larger(most, words[n / 4][n % 4]);
    float top = fmaxf(low(most), high(most)) * LOG2E, base = or_zero(top), sums[4] = {};
#pragma unroll
    for (int v = 0; v < EACH; v++) {
        bool whole = 8 * (int)(threadIdx.x + v * WORKERS) + 8 <= part.real;
        float of_piece = 0.0f;
#pragma unroll
        for (int n = 0; n < 4; n++) {
            float first = low(words[v][n]), second = high(words[v][n]);
            int at = 8 * v + 2 * n;
            powers[at] = power(fmaf(first, LOG2E, -base));
            powers[at + 1] = power(fmaf(second, LOG2E, -base));
            sums[n] += powers[at] + powers[at + 1];
            if (SMOOTHS) of_piece += first + second;
        }
        if (SMOOTHS) summed += whole ? of_piece : 0.0f;
    }
    return {top, (sums[0] + sums[1]) + (sums[2] + sums[3]), summed};
}

// Joins two of a lane each, and those of a warp.
template <bool SMOOTHS>
__device__ __forceinline__ Sums join(const Sums& a, const Sums& b) {
    float top = largest_of_warp(fmaxf(a.top, b.top)), base = or_zero(top);
    float total = sum_of_warp(a.total * power(a.top - base) + b.total * power(b.top - base));
    return {top, total, SMOOTHS ? sum_of_warp(a.summed + b.summed) : 0.0f};
}

__device__ __forceinline__ Sums cell(u32 at) {
    u32 v[4];
    read(at, v);
    return {__uint_as_float(v[0]), __uint_as_float(v[1]), __uint_as_float(v[2])};
}

// The gradient over a thread's share; 0 where columns do not count: their powers are 0, and they get no spread.
template <bool SMOOTHS>
__device__ __forceinline__ void put_gradient(u32 hold, const Part& part, const float (&powers)[8 * EACH], float factor,
                                             float spread) {
#pragma unroll
    for (int v = 0; v < EACH; v++) {
        int piece = threadIdx.x + v * WORKERS;
        float off = SMOOTHS && 8 * piece < part.real ? spread : 0.0f;
        u32 made[4];
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const float* both = powers + 8 * v + 2 * n;
            made[n] =
                SMOOTHS ? rounded(both[0] * factor - off, both[1] * factor - off) : rounded(both[0] * factor, both[1] * factor);
        }
        if (piece < part.pieces) put_chunk(hold + 16 * piece, made);
    }
    if (SMOOTHS && at_edge(part)) {
        for (int column = part.real; column % 8; column++) write_one(hold + 2 * column, 0);
    }
}
__device__ __forceinline__ void put_zeros(u32 hold, const Part& part) {
    u32 zeros[4] = {};
#pragma unroll 1
    for (int piece = threadIdx.x; piece < part.pieces; piece += WORKERS) put_chunk(hold + 16 * piece, zeros);
}

// All warps but the one that copies.
template <bool SMOOTHS>
__device__ __forceinline__ void work_rows(const Given& g, const Held& m, const Part& part, int rank) {
    int lane = threadIdx.x % 32, stride = gridDim.x / PARTS, row = blockIdx.x / PARTS;
    u32 own_cell = 16 * (rank * WARPS + threadIdx.x / 32);
    Turn turn, exchange;
    long long next = label_at(g.labels + row);
    for (; row < g.num; row += stride) {
        long long label = next;
        if (row + stride < g.num) next = label_at(g.labels + row + stride);
        bool counts = label != g.ignored;
        u32 hold = m.holds + turn.stage * HOLD_BYTES, cells = m.cells + exchange.stage * CELLS_BYTES,
            joined = m.joined + 8 * exchange.stage;
        float powers[8 * EACH];
        const Sums none = {lowest(), 0.0f, 0.0f};
        Sums own = none;
        barrier_wait(m.full + 8 * turn.stage, turn.phase);
        if (counts) own = take<SMOOTHS>(hold, part, powers);
        Sums of_warp = join<SMOOTHS>(own, none);
        if (lane < PARTS) tell(cells + own_cell, joined, lane, of_warp.top, of_warp.total, of_warp.summed);
        __syncwarp();
        barrier_wait(joined, exchange.phase);
        if (threadIdx.x == 0)
            barrier_expect(joined, CELLS_BYTES);  // for the row after the next, of which nobody can have sent yet
        if (counts) {
            Sums all = join<SMOOTHS>(cell(cells + 16 * lane), lane + 32 < CELLS ? cell(cells + 16 * (lane + 32)) : none);
            float lse = or_zero(all.top) + log2f(all.total), natural = lse * LN2;
            float weight = 1.0f + 2.0f * g.of_square * natural, spread = SMOOTHS ? g.of_all : 0.0f;
            long long column = label - part.first;
            bool has_label = column >= 0 && column < 8 * part.pieces && (int)column / 8 % WORKERS == (int)threadIdx.x;
            float hit = has_label ? low(read_one(hold + 2 * (u32)column)) : 0.0f;  // before this thread writes over it
            put_gradient<SMOOTHS>(hold, part, powers, power(own.top - lse) * weight, spread);
            if (has_label) {
                write_one(hold + 2 * (u32)column, rounded(power(fmaf(hit, LOG2E, -lse)) * weight - spread - g.of_target, 0.0f));
                g.losses[row] =
                    natural - g.of_target * hit - (SMOOTHS ? g.of_all * all.summed : 0.0f) + g.of_square * natural * natural;
            }
        } else {
            put_zeros(hold, part);
            if (rank == 0 && threadIdx.x == 0) g.losses[row] = 0.0f;
        }
        fence_async();
        __syncwarp();
        if (lane == 0) barrier_arrive(m.done + 8 * turn.stage);
        turn.next<HOLDS>();
        exchange.next<2>();
    }
}

template <bool SMOOTHS>
__device__ __forceinline__ void hold_rows(const Given& g, int num_real, int most_bytes) {
    extern __shared__ __align__(1024) char memory[];
    Held m = held_in(memory);
    int rank = cluster_rank();
    Part part = part_of(g.columns, num_real, rank);
    if (threadIdx.x < WORKERS) work_rows<SMOOTHS>(g, m, part, rank);
    else if (threadIdx.x == WORKERS) move_rows(g, m, part, most_bytes);
    __syncwarp();
    cluster_sync();  // a program that has ended has no cells
}

// logits [num, columns], 16-byte aligned, labels [num], losses [num]; columns % 8 == 0, columns <= PARTS * HOLD_BYTES / 2. A
// multiple of PARTS programs, of WORKERS + 32 threads. Copies are of most_bytes at most, a multiple of 16.
#define HELD(name, smooths)                                                                                         \
    extern "C" __global__ void __cluster_dims__(PARTS, 1, 1) __launch_bounds__(WORKERS + 32, 1)                     \
        name(u16* logits, const long long* labels, float* losses, int num, int columns, int num_real, int ignored,  \
             float of_target, float of_all, float of_square, int most_bytes) {                                      \
        hold_rows<smooths>({logits, labels, losses, num, columns, ignored, of_target, of_all, of_square}, num_real, \
                           most_bytes);                                                                             \
    }
HELD(held_losses, false)
HELD(held_losses_smoothed, true)
