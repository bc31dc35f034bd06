// What products on Hopper are made of here. One program a multiprocessor walks over tiles of 128 x 256, in clusters of two
// that share their second factor: each loads half of it and sends it to both. Of twelve warps eight multiply (two warpgroups,
// 64 rows of a tile each), one loads, and three finish: a warpgroup that has a result hands it over in shared memory and goes
// on with its next tile at once. So neither memory nor exponentials wait for products, nor products for them.
//
// A cluster begins with the tile of its own number, then takes the next one that nobody has: multiprocessors may be taken by others
// (communication), and who comes late would hold up all. The loading warp of its first program asks, a tile ahead, and tells both.
//
// Clusters that run at the same time work on the tiles of a few rows (``group``) and pass along these rows together. Where a
// product says so, the cache keeps the first factor's part of these rows, which is read again and again, and lets go of the second
// factor and of results, which are not.
//
// A stage holds rows of 128 bytes of both factors. Sums run over the inner dimension in order, in fp32.
constexpr int ROWS = 128, COLUMNS = 256;  // of a tile; each of two warpgroups multiplies 64 rows
constexpr int LINE = 128;                 // bytes of a row of a, and of b unless that is turned, that a stage holds
constexpr int STEP = LINE / 2;            // numbers of 16 bits of that
constexpr int A_BYTES = ROWS * LINE, B_BYTES = COLUMNS * LINE;
constexpr int PIECE = 64 * 64 * 2;  // what one warpgroup hands over are four of these, side by side
constexpr int STAGES = 3;
constexpr int THREADS = 384;  // two warpgroups multiply; of the third one warp loads and three finish

constexpr u64 SWIZZLED = (1ull << 62) | (64ull << 32);  // rows of 128 bytes, 8 of them after one another
__device__ __forceinline__ u64 described(u32 at, u64 kind) { return kind | ((at & 0x3FFFF) >> 4); }

struct Turn {
    int stage = 0;
    u32 phase = 0;
    template <int STAGES>
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
        }
    }
};

__device__ __forceinline__ void place(int tile, int rows, int columns, int group, int& i, int& j) {
    int width = group * columns, first = tile / width * group, within = tile % width;
    int high = min(rows - first, group);
    i = first + within % high;
    j = within / high;
}

// One warpgroup: 64 rows of the tile, all columns. b is [columns, STEP] in memory, or [STEP, columns] if it is turned; a
// likewise. NARROW: of numbers of 8 bits, e4m3, neither turned; a stage holds twice as many, of which an instruction takes twice as
// many, in as many bytes. Their sums stay in the tensor cores, which keep fewer bits than fp32: what others call fast accumulation.
template <int TURNED, int TURNED_A = 0, bool NARROW = false>
__device__ __forceinline__ void product(float (&d)[128], u32 a, u32 b, u32 full, u32 empty, Turn& turn, int steps, bool signals,
                                        u32 signal_to) {
    constexpr u64 B_KIND = SWIZZLED | (TURNED ? (u64)(B_BYTES / 4 >> 4) : 1ull) << 16;  // turned: four panels of 64 columns
    constexpr u64 A_STEP = TURNED_A ? 128 : 2, B_STEP = TURNED ? 128 : 2;
    int before = 0;
    for (int step = 0; step < steps; step++) {
        barrier_wait(full + 8 * turn.stage, turn.phase);
        u64 at_a = described(a + turn.stage * A_BYTES, SWIZZLED | (1ull << 16));
        u64 at_b = described(b + turn.stage * B_BYTES, B_KIND);
        multiplies_begin();
#pragma unroll
        for (int k = 0; k < STEP / 16; k++) {
            if constexpr (NARROW) multiply_narrow(d, at_a + A_STEP * k, at_b + B_STEP * k, step > 0 || k > 0);
            else multiply<TURNED, TURNED_A>(d, at_a + A_STEP * k, at_b + B_STEP * k, step > 0 || k > 0);
        }
        multiplies_commit();
        multiplies_wait<1>();
        if (step > 0 && signals) barrier_arrive_at(empty + 8 * before, signal_to);
        before = turn.stage;
        turn.next<STAGES>();
    }
    multiplies_wait<0>();
    if (signals) barrier_arrive_at(empty + 8 * before, signal_to);
}

// Where this lane's row of an 8 x 8 matrix lies in a [64, 64] piece with 128-byte rows, swizzled; columns 8 chunk and 16 from
// there.
__device__ __forceinline__ u32 matrix_row(u32 piece, int thread, int chunk) {
    int lane = thread & 31, row = (thread >> 5) * 16 + (lane & 15);
    return piece + row * 128 + (((chunk + (lane >> 4)) ^ (row & 7)) << 4);
}
// A warpgroup's [64, 256], TIMES a factor, as four pieces, rounded.
template <bool TIMES = false>
__device__ __forceinline__ void hand_over(float (&d)[128], u32 pieces, int thread, u32 taken, u32 parity, u32 given,
                                          float factor = 1.0f) {
    auto two = [&](int i) { return TIMES ? rounded(d[i] * factor, d[i + 1] * factor) : rounded(d[i], d[i + 1]); };
    barrier_wait(taken, parity);
#pragma unroll
    for (int c = 0; c < 32; c += 2) {
        int i = 4 * c;
        put(matrix_row(pieces + c / 8 * PIECE, thread, c % 8), two(i), two(i + 2), two(i + 4), two(i + 6));
    }
    fence_async();
    __syncwarp();
    if ((thread & 31) == 0) barrier_arrive(given);
}
// Columns 128 half to 128 half + 128 of it in fp32, as four pieces of [64, 32].
template <int HALF>
__device__ __forceinline__ void hand_over_wide(float (&d)[128], u32 pieces, int thread, u32 taken, u32 parity, u32 given) {
    barrier_wait(taken, parity);
    int lane = thread & 31, row = (thread >> 5) * 16 + lane / 4;
#pragma unroll
    for (int c = 0; c < 16; c++) {  // 8 columns each, of which a lane has two in each of two rows
        u32 at = pieces + c / 4 * PIECE + row * 128 + (lane & 1) * 8;
        int chunk = c % 4 * 2 + (lane & 3) / 2, i = 4 * (16 * HALF + c);
        put_two(at + ((chunk ^ (row & 7)) << 4), d[i], d[i + 1]);
        put_two(at + 8 * 128 + ((chunk ^ (row & 7)) << 4), d[i + 2], d[i + 3]);
    }
    fence_async();
    __syncwarp();
    if (lane == 0) barrier_arrive(given);
}
__device__ __forceinline__ u32 chunk_at(u32 pieces, int row, int chunk) {
    return pieces + chunk / 8 * PIECE + row * 128 + (((chunk & 7) ^ (row & 7)) << 4);
}

// Four pieces: 128 columns of the gate, and of up, which is F columns behind it.
__device__ __forceinline__ void send_gate_and_up(const Map* both, int F, int column, int y, u32 pieces) {
    send(both, column, y, pieces, FIRST_OUT);
    send(both, column + 64, y, pieces + PIECE, FIRST_OUT);
    send(both, F + column, y, pieces + 2 * PIECE, FIRST_OUT);
    send(both, F + column + 64, y, pieces + 3 * PIECE, FIRST_OUT);
}

struct Memory {
    u32 b, a, pieces, full, empty, given, taken, told, tiles;
};
constexpr int SLOTS = 8;  // numbers of tiles that have been told of and may not have been read by all

// The tiles of a cluster, one after another; each reader has its own.
struct Tiles {
    const Memory& m;
    int tile, count = 0;
    __device__ __forceinline__ Tiles(const Memory& m) : m(m), tile(blockIdx.x / 2) {}
    __device__ __forceinline__ void next() {
        int slot = count % SLOTS;
        barrier_wait(m.told + 8 * slot, count / SLOTS & 1);
        tile = number_at(m.tiles + 4 * slot);
        count++;
    }
};
// ``takers``: how many arrivals say that what was handed over has been taken.
__device__ __forceinline__ Memory laid_out(char* memory, int takers = 3) {
    u32 b = (address(memory) + 1023) & ~1023u, a = b + STAGES * B_BYTES, pieces = a + STAGES * A_BYTES,
        full = pieces + 8 * PIECE;
    u32 given = full + 16 * STAGES, told = given + 32;
    Memory m = {b, a, pieces, full, full + 8 * STAGES, given, given + 16, told, told + 8 * SLOTS};
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(m.full + 8 * s, 1);
            barrier_init(m.empty + 8 * s, 4);
        }
        for (int w = 0; w < 2; w++) {
            barrier_init(m.given + 8 * w, 4);
            barrier_init(m.taken + 8 * w, takers);
        }
        for (int n = 0; n < SLOTS; n++) barrier_init(m.told + 8 * n, 1);
        barriers_made();
        for (int n = 0; n < SLOTS; n++) barrier_expect(m.told + 8 * n, 4);
    }
    cluster_sync();
    return m;
}

// The warp that loads. Of the second factor a program takes 128 of a tile's 256 rows (columns, if it is turned) for both: those
// from width j + half rank on. What is past the end of a matrix is read as zeros. ``counters``: tiles asked for beyond the first of
// each cluster, and clusters that have ended; both are zero before and afterwards.
//
// Nobody says that a number has been read. When that of tile n + 1 is told, STAGES steps into tile n, or in its last one, those who
// multiply are at most STAGES steps behind, and those who finish one tile behind them: all have read n - SLOTS + 1, whose place it
// takes.
template <int TURNED, int TURNED_A, bool KEEPS>
__device__ __forceinline__ void load_tiles(const Map* first, const Map* second, const Memory& m, int rows, int columns,
                                           int group, int steps, int width, int half, int* counters) {
    if (threadIdx.x % 32 != 0) return;
    constexpr u64 FIRST = KEEPS ? LAST_OUT : ORDINARY, SECOND = KEEPS ? FIRST_OUT : ORDINARY;
    u32 rank = cluster_rank();
    int clusters = gridDim.x / 2;
    Turn turn;
    turn.phase = 1;
    for (Tiles t(m); t.tile < rows * columns;) {
        int i, j, next = 0, slot = t.count % SLOTS;
        if (rank == 0) next = atomicAdd(counters, 1) + clusters;
        place(t.tile, rows, columns, group, i, j);
        int start = j * width + rank * half;
        for (int step = 0; step < steps; step++) {
            if (rank == 0 && step == min(STAGES, steps - 1)) {
                for (int to = 0; to < 2; to++) tell(m.tiles + 4 * slot, m.told + 8 * slot, to, next);
            }
            barrier_wait(m.empty + 8 * turn.stage, turn.phase);
            u32 there = m.full + 8 * turn.stage, to = m.b + turn.stage * B_BYTES + rank * (B_BYTES / 2);
            barrier_expect(there, A_BYTES + B_BYTES);
            int row = (2 * i + rank) * ROWS;
            if (TURNED_A) {
                load(m.a + turn.stage * A_BYTES, first, row, step * STEP, there, FIRST);
                load(m.a + turn.stage * A_BYTES + A_BYTES / 2, first, row + 64, step * STEP, there, FIRST);
            } else {
                load(m.a + turn.stage * A_BYTES, first, step * STEP, row, there, FIRST);
            }
            if (TURNED) {
                load_both(to, second, start, step * STEP, there, SECOND);
                load_both(to + B_BYTES / 4, second, start + 64, step * STEP, there, SECOND);
            } else {
                load_both(to, second, step * STEP, start, there, SECOND);
            }
            turn.next<STAGES>();
        }
        t.next();
        barrier_expect(m.told + 8 * slot, 4);  // of the tile SLOTS later
    }
    if (rank == 0 && atomicAdd(counters + 1, 1) == clusters - 1) counters[0] = counters[1] = 0;
}

// The warpgroups that multiply. What they hand over is rounded, or (WIDE) in fp32 and in two halves.
template <int TURNED, int TURNED_A, bool WIDE>
__device__ __forceinline__ void multiply_tiles(const Memory& m, int tiles, int steps) {
    int thread = threadIdx.x & 127, who = __shfl_sync(0xFFFFFFFFu, threadIdx.x >> 7, 0);  // one value a warp, for all to see
    Turn turn;
    u32 parity = 1;
    float d[128];
    u32 pieces = m.pieces + who * 4 * PIECE, taken = m.taken + 8 * who, given = m.given + 8 * who;
    for (Tiles t(m); t.tile < tiles; t.next()) {
        product<TURNED, TURNED_A>(d, m.a + who * (A_BYTES / 2), m.b, m.full, m.empty, turn, steps, thread < 2, thread & 1);
        if (WIDE) {
            hand_over_wide<0>(d, pieces, thread, taken, 1, given);
            hand_over_wide<1>(d, pieces, thread, taken, 0, given);
        } else {
            hand_over(d, pieces, thread, taken, parity, given);
            parity ^= 1;
        }
    }
}

// Runs what each warp is for; ``finish(warp, lane)`` is for three of them, 0 to 2. KEEPS: the cache is told what to keep.
template <int TURNED, int TURNED_A = 0, bool WIDE = false, bool KEEPS = false, class Finish>
__device__ __forceinline__ void run_tiles(const Map* first, const Map* second, const Memory& m, int rows, int columns,
                                          int group, int steps, int width, int half, int* counters, Finish finish) {
    int warp = threadIdx.x / 32;
    if (warp < 8) {
        more_registers<200>();
        multiply_tiles<TURNED, TURNED_A, WIDE>(m, rows * columns, steps);
    } else {
        fewer_registers<104>();
        if (warp == 8)
            load_tiles<TURNED, TURNED_A, KEEPS>(first, second, m, rows, columns, group, steps, width, half, counters);
        else finish(warp - 9, threadIdx.x & 31);
    }
    __syncwarp();
    cluster_sync();
}

// As ``run_tiles``, of numbers of 8 bits; what is handed over is the product times ``factor``, rounded.
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
            product<0, 0, true>(d, m.a + who * (A_BYTES / 2), m.b, m.full, m.empty, turn, steps, thread < 2, thread & 1);
            hand_over<true>(d, m.pieces + who * 4 * PIECE, thread, m.taken + 8 * who, parity, m.given + 8 * who, factor);
        }
    } else {
        fewer_registers<104>();
        if (warp == 8) load_tiles<0, 0, KEEPS>(first, second, m, rows, columns, group, steps, width, half, counters);
        else finish(warp - 9, threadIdx.x & 31);
    }
    __syncwarp();
    cluster_sync();
}
