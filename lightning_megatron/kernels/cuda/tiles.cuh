// What products on Hopper are made of here. One program a multiprocessor walks over tiles of 128 x 256, in clusters of two
// that share their second factor: each loads half of it and sends it to both. Of twelve warps eight multiply (two warpgroups,
// 64 rows of a tile each), one loads, and three finish: a warpgroup that has a result hands it over in shared memory and goes
// on with its next tile at once. So neither memory nor exponentials wait for products, nor products for them.
//
// A cluster begins with the tile of its own number, then takes the next one that nobody has: multiprocessors may be taken by others
// (communication), and who comes late would hold up all. The loading warp of its first program asks, a tile ahead, and tells both.
//
// A stage holds rows of 128 bytes of both factors. Sums run over the inner dimension in order, in fp32.
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
struct alignas(64) Map {
    char bytes[128];
};  // CUtensorMap

constexpr int ROWS = 128, COLUMNS = 256;  // of a tile; each of two warpgroups multiplies 64 rows
constexpr int LINE = 128;                 // bytes of a row of a, and of b unless that is turned, that a stage holds
constexpr int STEP = LINE / 2;            // numbers of 16 bits of that
constexpr int A_BYTES = ROWS * LINE, B_BYTES = COLUMNS * LINE;
constexpr int PIECE = 64 * 64 * 2;  // what one warpgroup hands over are four of these, side by side
constexpr int STAGES = 3;
constexpr int THREADS = 384;  // two warpgroups multiply; of the third one warp loads and three finish

__device__ __forceinline__ u32 address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void barrier_init(u32 b, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(b), "r"(count));
}
__device__ __forceinline__ void barrier_expect(u32 b, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" : : "r"(b), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 b, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nwaiting:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@done bra.uni over;\nbra.uni waiting;\nover:\n}"
        :
        : "r"(b), "r"(parity)
        : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 b) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(b) : "memory");
}
__device__ __forceinline__ void barrier_arrive_at(u32 b, u32 rank) {
    asm volatile(
        "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [there];\n}"
        :
        : "r"(b), "r"(rank)
        : "memory");
}
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" : : : "memory");
}
__device__ __forceinline__ u32 cluster_rank() {
    u32 r;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}
__device__ __forceinline__ void load(u32 to, const Map* map, int x, int y, u32 b) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 :
                 : "r"(to), "l"(map), "r"(x), "r"(y), "r"(b)
                 : "memory");
}
__device__ __forceinline__ void load_both(u32 to, const Map* map, int x, int y, u32 b) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;"
        :
        : "r"(to), "l"(map), "r"(x), "r"(y), "r"(b), "h"((u16)3)
        : "memory");
}
__device__ __forceinline__ void send(const Map* map, int x, int y, u32 from) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];\ncp.async.bulk.commit_group;"
                 :
                 : "l"(map), "r"(x), "r"(y), "r"(from)
                 : "memory");
}
__device__ __forceinline__ void send_to_add(const Map* map, int x, int y, u32 from) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%1, %2}], [%3];\ncp.async.bulk.commit_group;"
        :
        : "l"(map), "r"(x), "r"(y), "r"(from)
        : "memory");
}
template <int PENDING>
__device__ __forceinline__ void sent() {
    asm volatile("cp.async.bulk.wait_group.read %0;" : : "n"(PENDING) : "memory");
}
__device__ __forceinline__ void written() { asm volatile("cp.async.bulk.wait_group 0;" : : : "memory"); }
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" : : : "memory"); }
template <int N>
__device__ __forceinline__ void more_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(N));
}
template <int N>
__device__ __forceinline__ void fewer_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(N));
}

#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D16(i) D4(i), D4(i + 4), D4(i + 8), D4(i + 12)
#define D64(i) D16(i), D16(i + 16), D16(i + 32), D16(i + 48)
template <int TURNED, int TURNED_A = 0>
__device__ __forceinline__ void multiply(float (&d)[128], u64 a, u64 b, int add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"
        "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,"
        "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
        "}, %128, %129, p, 1, 1, %132, %131;\n}"
        : D64(0), D64(64)
        : "l"(a), "l"(b), "r"(add), "n"(TURNED), "n"(TURNED_A));
}
__device__ __forceinline__ void multiplies_begin() { asm volatile("wgmma.fence.sync.aligned;" : : : "memory"); }
__device__ __forceinline__ void multiplies_commit() { asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory"); }
template <int N>
__device__ __forceinline__ void multiplies_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(N) : "memory");
}

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
// likewise.
template <int TURNED, int TURNED_A = 0>
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
        for (int k = 0; k < STEP / 16; k++)
            multiply<TURNED, TURNED_A>(d, at_a + A_STEP * k, at_b + B_STEP * k, step > 0 || k > 0);
        multiplies_commit();
        multiplies_wait<1>();
        if (step > 0 && signals) barrier_arrive_at(empty + 8 * before, signal_to);
        before = turn.stage;
        turn.next<STAGES>();
    }
    multiplies_wait<0>();
    if (signals) barrier_arrive_at(empty + 8 * before, signal_to);
}

__device__ __forceinline__ u32 rounded(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
__device__ __forceinline__ float low(u32 both) { return __uint_as_float(both << 16); }
__device__ __forceinline__ float high(u32 both) { return __uint_as_float(both & 0xFFFF0000u); }
__device__ __forceinline__ float sigmoid(float x) {
    float e, s;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x * -1.44269502162933349609375f));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(s) : "f"(e + 1.0f));
    return s;
}
// Where this lane's row of an 8 x 8 matrix lies in a [64, 64] piece with 128-byte rows, swizzled; columns 8 chunk and 16 from
// there.
__device__ __forceinline__ u32 matrix_row(u32 piece, int thread, int chunk) {
    int lane = thread & 31, row = (thread >> 5) * 16 + (lane & 15);
    return piece + row * 128 + (((chunk + (lane >> 4)) ^ (row & 7)) << 4);
}
__device__ __forceinline__ void put(u32 at, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 :
                 : "r"(at), "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}
__device__ __forceinline__ void put_two(u32 at, float a, float b) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" : : "r"(at), "f"(a), "f"(b) : "memory");
}
// A warpgroup's [64, 256] as four pieces, rounded.
__device__ __forceinline__ void hand_over(float (&d)[128], u32 pieces, int thread, u32 taken, u32 parity, u32 given) {
    barrier_wait(taken, parity);
#pragma unroll
    for (int c = 0; c < 32; c += 2) {
        int i = 4 * c;
        put(matrix_row(pieces + c / 8 * PIECE, thread, c % 8), rounded(d[i], d[i + 1]), rounded(d[i + 2], d[i + 3]),
            rounded(d[i + 4], d[i + 5]), rounded(d[i + 6], d[i + 7]));
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
__device__ __forceinline__ void read(u32 at, u32 (&v)[4]) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "r"(at)
                 : "memory");
}
__device__ __forceinline__ u32 chunk_at(u32 pieces, int row, int chunk) {
    return pieces + chunk / 8 * PIECE + row * 128 + (((chunk & 7) ^ (row & 7)) << 4);
}
__device__ __forceinline__ uint4 fetch(const u16* p) {  // in order, so that several are under way before the first is used
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ void store(u16* p, const u32 (&v)[4]) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" : : "l"(p), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
}
__device__ __forceinline__ void prefetch_line(const void* p) { asm volatile("prefetch.global.L2 [%0];" : : "l"(p)); }

struct Memory {
    u32 b, a, pieces, full, empty, given, taken, told, tiles;
};
constexpr int SLOTS = 8;  // numbers of tiles that have been told of and may not have been read by all

__device__ __forceinline__ void tell(u32 cell, u32 b, u32 rank, int value) {
    asm volatile(
        "{\n.reg .b32 there, signal;\nmapa.shared::cluster.u32 there, %0, %2;\nmapa.shared::cluster.u32 signal, %1, %2;\n"
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [there], %3, [signal];\n}"
        :
        : "r"(cell), "r"(b), "r"(rank), "r"(value)
        : "memory");
}
__device__ __forceinline__ int number_at(u32 at) {
    int v;
    asm volatile("ld.shared.s32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
    return v;
}
__device__ __forceinline__ void finishers_sync() { asm volatile("bar.sync 1, 96;" : : : "memory"); }
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
        asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory");
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
template <int TURNED, int TURNED_A>
__device__ __forceinline__ void load_tiles(const Map* first, const Map* second, const Memory& m, int rows, int columns,
                                           int group, int steps, int width, int half, int* counters) {
    if (threadIdx.x % 32 != 0) return;
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
                load(m.a + turn.stage * A_BYTES, first, row, step * STEP, there);
                load(m.a + turn.stage * A_BYTES + A_BYTES / 2, first, row + 64, step * STEP, there);
            } else {
                load(m.a + turn.stage * A_BYTES, first, step * STEP, row, there);
            }
            if (TURNED) {
                load_both(to, second, start, step * STEP, there);
                load_both(to + B_BYTES / 4, second, start + 64, step * STEP, there);
            } else {
                load_both(to, second, step * STEP, start, there);
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

// Runs what each warp is for; ``finish(warp, lane)`` is for three of them, 0 to 2.
template <int TURNED, int TURNED_A = 0, bool WIDE = false, class Finish>
__device__ __forceinline__ void run_tiles(const Map* first, const Map* second, const Memory& m, int rows, int columns,
                                          int group, int steps, int width, int half, int* counters, Finish finish) {
    int warp = threadIdx.x / 32;
    if (warp < 8) {
        more_registers<200>();
        multiply_tiles<TURNED, TURNED_A, WIDE>(m, rows * columns, steps);
    } else {
        fewer_registers<104>();
        if (warp == 8) load_tiles<TURNED, TURNED_A>(first, second, m, rows, columns, group, steps, width, half, counters);
        else finish(warp - 9, threadIdx.x & 31);
    }
    __syncwarp();
    cluster_sync();
}
