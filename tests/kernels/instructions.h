// The functions of kernels/cuda/primitives.cuh on a CPU. Products read shared memory as late as they may; the four warps of a
// warpgroup begin and end theirs together, as they do on the GPU. Wrong addresses, arrivals that nobody awaits and results that are
// written twice end the program with a word.
#include "emulator.h"

void check(Bar& b) {
    if (b.pending == 0 && b.tx == 0) {
        b.phase++;
        b.pending = b.count;
    }
}
Bar& bar(Cta& c, u32 at) {
    if (at % 8 || at >= SMEM) wrong("address of a barrier");
    return c.bars[at / 8];
}
u32 address(const void*) { return 16; }
void barrier_init(u32 b, int n) { bar(here(), b) = {n, n, 0, 0}; }
void arrive(Bar& b) {
    if (b.pending <= 0) wrong("arrival not awaited");
    b.pending--;
    check(b);
}
void barrier_expect(u32 b, u32 n) {
    Bar& x = bar(here(), b);
    x.tx += n;
    arrive(x);
}
void barrier_arrive(u32 b) { arrive(bar(here(), b)); }
void barrier_arrive_at(u32 b, u32 rank) { arrive(bar(cta[now->block / P * P + rank], b)); }
void barrier_wait(u32 b, u32 parity) {
    if (parity > 1) wrong("parity");
    now->bar = &bar(here(), b);
    now->value = parity;
    pause(BAR);
}
void cluster_sync() {
    int c = now->block / P;
    now->value = cluster_round[c];
    if (++cluster_arrived[c] == P * T) {
        cluster_arrived[c] = 0;
        cluster_round[c]++;
    }
    pause(CLUSTER);
}
u32 cluster_rank() { return now->block % P; }
Warp& warp() { return warps[now->block * (T / 32) + now->thread / 32]; }
void warp_barrier() {
    Warp& w = warp();
    now->value = w.round;
    if (++w.arrived == 32) {
        w.arrived = 0;
        w.round++;
    }
    pause(WARP);
}
void __syncwarp() { warp_barrier(); }
int __shfl_sync(u32, int v, int) { return v; }
template <int N>
void more_registers() {}
template <int N>
void fewer_registers() {}
void prefetch_line(const void*) {}
void fence_async() {}
void barriers_made() {}
template <class A>
A& at_smem(Cta& c, u32 a) {
    if (a % sizeof(A) || a + sizeof(A) > (u32)SMEM) wrong("address");
    return *(A*)&c.smem[a];
}
struct V4 {
    u32 v[4];
};
void read(u32 at, u32 (&v)[4]) {
    V4 x = at_smem<V4>(here(), at);
    memcpy(v, x.v, 16);
}
void put_chunk(u32 at, const u32 (&v)[4]) { memcpy(at_smem<V4>(here(), at).v, v, 16); }
void put_two(u32 at, float a, float b) {
    if (at % 8) wrong("put_two");
    at_smem<float>(here(), at) = a;
    at_smem<float>(here(), at + 4) = b;
}
u32 __float_as_uint(float x) {
    u32 y;
    memcpy(&y, &x, 4);
    return y;
}
float __uint_as_float(u32 x) {
    float y;
    memcpy(&y, &x, 4);
    return y;
}
float low(u32 both) { return __uint_as_float(both << 16); }
float high(u32 both) { return __uint_as_float(both & 0xFFFF0000u); }
u32 one(float x) {
    u32 u = __float_as_uint(x);
    if (x != x) return 0x7FFF;
    return (u + 0x7FFF + ((u >> 16) & 1)) >> 16;
}
u32 rounded(float a, float b) { return one(a) | one(b) << 16; }
float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
void put(u32 at, u32 a, u32 b, u32 c, u32 d) {
    Warp& w = warp();
    int lane = now->thread % 32, side = w.round & 1;
    w.at[side][lane] = at;
    warp_barrier();
    u32 v[4] = {a, b, c, d};
    for (int n = 0; n < 4; n++) {
        u32 row = w.at[side][8 * n + lane / 4];
        if (row % 16) wrong("put");
        at_smem<u32>(here(), row + lane % 4 * 4) = v[n];
    }
}
uint4 fetch(const u16* p) {
    if ((u64)p % 16) wrong("fetch");
    return *(const uint4*)p;
}
void store(u16* p, const u32 (&v)[4], u64) {
    if ((u64)p % 16) wrong("store");
    for (int i = 0; i < 4; i++)
        if (((u32*)p)[i] != NOT_WRITTEN * 0x10001u) wrong("stored twice");
    memcpy(p, v, 16);
}
void load(u32 to, const Map* map, int x, int y, u32 b, u64) {
    if (to % 1024) wrong("load");
    flying.push_back({LOAD, now->block, now, to, b, map, x, y});
}
void load_both(u32 to, const Map* map, int x, int y, u32 b, u64) {
    for (int r = 0; r < 2; r++) flying.push_back({LOAD, now->block / P * P + r, now, to, b, map, x, y});
}
constexpr u64 ORDINARY = 0, FIRST_OUT = 1, LAST_OUT = 2;
void send(const Map* map, int x, int y, u32 from, u64 = ORDINARY) {
    now->unread++;
    flying.push_back({STORE, now->block, now, from, 0, map, x, y});
}
void send_to_add(const Map* map, int x, int y, u32 from) {
    now->unread++;
    flying.push_back({ADD, now->block, now, from, 0, map, x, y});
}
template <int N>
void sent() {
    static_assert(N == 0, "");
    pause(READS);
}
void written() { pause(READS); }
u32 swizzled(u32 at) { return at ^ ((at >> 7 & 7) << 4); }
void told(Bar& b, long n) {
    b.tx -= n;  // may come before it is expected
    check(b);
}
void land(Copy m) {
    Cta& c = cta[m.block];
    if (!c.left) wrong("what lands at a program that has ended, or is taken from it");
    switch (m.kind) {
        case NUMBER:
            at_smem<int>(c, m.to) = m.value;
            return told(bar(c, m.b), 4);
        case NUMBERS:
            memcpy(at_smem<V4>(c, m.to).v, m.numbers, 16);
            return told(bar(c, m.b), 16);
        case BULK_LOAD:
            memcpy(&c.smem[m.to], m.far, m.bytes);
            return told(bar(c, m.b), m.bytes);
        case BULK_STORE:
            memcpy(m.far, &c.smem[m.to], m.bytes);
            m.by->unread--;
            return;
        default:
            break;
    }
    const Map& p = *m.map;
    if (p.box_columns * p.size != 128) wrong("box");
    for (int r = 0; r < p.box_rows; r++)
        for (int k = 0; k < p.box_columns; k++) {
            u32 at = swizzled(m.to + r * 128 + k * p.size);
            int row = m.y + r, column = m.x + k;
            bool inside = row >= 0 && row < p.rows && column >= 0 && column < p.columns;
            unsigned char* far = p.p + ((long)row * p.columns + column) * p.size;
            if (m.kind == LOAD) {
                if (inside) memcpy(&c.smem[at], far, p.size);
                else memset(&c.smem[at], 0, p.size);
            }
            if (m.kind == STORE && inside) {
                if (p.size == 2 && *(u16*)far != NOT_WRITTEN) wrong("sent twice");
                memcpy(far, &c.smem[at], p.size);
            }
            if (m.kind == ADD && inside) *(float*)far += *(float*)&c.smem[at];
            if (m.kind != LOAD && !inside) wrong("sent outside");
        }
    if (m.kind == LOAD) told(bar(c, m.b), (long)p.box_rows * 128);
    else m.by->unread--;
}
float of_e4m3(unsigned char x) {
    int exponent = x >> 3 & 15, digits = x & 7;
    float size = exponent ? ldexpf(8 + digits, exponent - 10) : ldexpf(digits, -9);
    return x & 128 ? -size : size;
}
float element(Cta& c, u64 desc, bool turned, int mn, int k, bool narrow) {
    u32 start = (desc & 0x3FFF) << 4, lbo = (desc >> 16 & 0x3FFF) * 16, sbo = (desc >> 32 & 0x3FFF) * 16;
    if (desc >> 62 != 1) wrong("descriptor");
    u32 at = turned ? start + mn / 64 * lbo + k / 8 * sbo + k % 8 * 128 + mn % 64 * 2
                    : start + mn / 8 * sbo + mn % 8 * 128 + k * (narrow ? 1 : 2);
    at = swizzled(at);
    if (at + 2 > (u32)SMEM) wrong("operand");
    if (narrow) return of_e4m3(c.smem[at]);
    return __uint_as_float((u32) * (u16*)&c.smem[at] << 16);
}
void execute(const Op& o) {
    int lane = now->thread % 32, first = now->thread % 128 / 32 * 16 + lane / 4, inner = o.narrow ? 32 : 16;
    float a[2][32];
    for (int h = 0; h < 2; h++)
        for (int k = 0; k < inner; k++) a[h][k] = element(here(), o.a, o.ta, first + 8 * h, k, o.narrow);
    for (int j = 0; j < 32; j++)
        for (int e = 0; e < 2; e++) {
            float sum[2] = {};
            int n = 8 * j + 2 * (lane % 4) + e;
            for (int k = 0; k < inner; k++) {
                float b = element(here(), o.b, o.tb, n, k, o.narrow);
                sum[0] += a[0][k] * b;
                sum[1] += a[1][k] * b;
            }
            for (int h = 0; h < 2; h++) {
                float& d = o.d[4 * j + 2 * h + e];
                d = (o.add ? d : 0.0f) + sum[h];
            }
        }
}
template <int TURNED, int TURNED_A = 0>
void multiply(float (&d)[128], u64 a, u64 b, int add) {
    now->open.push_back({add, a, b, (bool)TURNED_A, (bool)TURNED, d});
}
void multiply_narrow(float (&d)[128], u64 a, u64 b, int add) { now->open.push_back({add, a, b, false, false, d, true}); }
void multiplies_begin() {
    Cta& c = here();
    int g = now->thread / 128;
    now->value = c.group_round[g];
    if (++c.group[g] == 128) {
        c.group[g] = 0;
        c.group_round[g]++;
    }
    pause(GROUP);
}  // WARPGROUP.ARRIVE
void multiplies_commit() {
    now->groups.push_back(now->open);
    now->open.clear();
}
template <int N>
void multiplies_wait() {
    bool any = (int)now->groups.size() > N;
    while ((int)now->groups.size() > N) {
        for (auto& o : now->groups.front()) execute(o);
        now->groups.erase(now->groups.begin());
    }
    if (any) multiplies_begin();
}  // a group of products ends for its four warps together
void tell(u32 cell, u32 b, u32 rank, int value) {
    flying.push_back({NUMBER, now->block / P * P + (int)rank, now, cell, b, nullptr, 0, 0, value});
}
int number_at(u32 at) { return at_smem<int>(here(), at); }
void finishers_sync() {
    Cta& c = here();
    now->value = c.finishing_round;
    if (++c.finishing == 96) {
        c.finishing = 0;
        c.finishing_round++;
    }
    pause(FINISHERS);
}
int atomicAdd(int* p, int v) {
    int old = *p;
    *p += v;
    return old;
}
int atomicMax(int* p, int v) {
    int old = *p;
    *p = max(old, v);
    return old;
}
u32 among_the_warp(u32 mine, int from) {
    Warp& w = warp();
    int side = w.round & 1;
    w.at[side][now->thread % 32] = mine;
    warp_barrier();
    return w.at[side][from];
}
float __shfl_xor_sync(u32, float x, int n) { return __uint_as_float(among_the_warp(__float_as_uint(x), now->thread % 32 ^ n)); }
u32 __reduce_max_sync(u32, u32 x) {
    for (int n = 16; n; n /= 2) x = max(x, among_the_warp(x, now->thread % 32 ^ n));
    return x;
}
u32 __byte_perm(u32 a, u32 b, u32 order) {
    u64 both = a | (u64)b << 32;
    u32 made = 0;
    for (int n = 0; n < 4; n++) made |= (u32)(both >> 8 * (order >> 4 * n & 7) & 255) << 8 * n;
    return made;
}
float sigmoid_as_triton(float x) { return sigmoid(x); }
unsigned char to_e4m3(float x) {  // to the nearest, and of two the even one
    unsigned char sign = __float_as_uint(x) >> 31 << 7;
    if (x != x) return 0x7F;
    float a = fabsf(x);
    if (a >= 448) return sign | 0x7E;
    int exponent = max(a > 0 ? ilogbf(a) : -6, -6), digits = (int)nearbyintf(ldexpf(a, 3 - exponent));
    return sign | (digits >= 16 ? (exponent + 8) << 3 : digits >= 8 ? (exponent + 7) << 3 | (digits - 8) : digits);
}
u32 narrowed(float a, float b, float c, float d) {
    return to_e4m3(a) | to_e4m3(b) << 8 | to_e4m3(c) << 16 | (u32)to_e4m3(d) << 24;
}
constexpr unsigned char BYTE_NOT_WRITTEN = 0xFF;  // NaN in e4m3
void store_bytes(unsigned char* p, const void* from, int n) {
    if ((u64)p % n) wrong("store of bytes");
    for (int i = 0; i < n; i++)
        if (p[i] != BYTE_NOT_WRITTEN) wrong("byte stored twice");
    memcpy(p, from, n);
}
void store_two(unsigned char* p, const u32 (&v)[2]) { store_bytes(p, v, 8); }
void store_one(unsigned char* p, u32 v) { store_bytes(p, &v, 4); }
float power(float x) { return exp2f(x); }
u32 larger(u32 a, u32 b) { return one(fmaxf(low(a), low(b))) | one(fmaxf(high(a), high(b))) << 16; }
u32 read_one(u32 at) { return at_smem<u16>(here(), at); }
void write_one(u32 at, u32 v) { at_smem<u16>(here(), at) = v; }
// What bulk copies and loads of labels may touch.
const unsigned char *memory_first, *memory_last;
const long long *labels_first, *labels_last;
long long label_at(const long long* p) {
    if (p < labels_first || p >= labels_last) wrong("label out of reach");
    return *p;
}
u64 used_once() { return FIRST_OUT; }
void bulk(Way way, const void* far, u32 at, u32 n, u32 b) {
    auto* p = (unsigned char*)far;
    if (p < memory_first || p + n > memory_last || (u64)p % 16 || n % 16 || !n || at % 16 || at + n > (u32)SMEM)
        wrong("copy out of bounds, or not aligned");
    for (u32 done = 0; done < n; done += 4096) {  // lands in parts
        Copy copy = {way, now->block, now, at + done, b, nullptr, 0, 0};
        copy.far = p + done;
        copy.bytes = min(4096u, n - done);
        now->unread += way == BULK_STORE;
        flying.push_back(copy);
    }
}
void copy_in(u32 to, const void* from, u32 n, u32 b, u64) { bulk(BULK_LOAD, from, to, n, b); }
void copy_out(void* to, u32 from, u32 n, u64) { bulk(BULK_STORE, to, from, n, 0); }
void copies_commit() {}
void tell(u32 cell, u32 b, u32 rank, float x, float y, float z) {
    Copy copy = {NUMBERS, now->block / P * P + (int)rank, now, cell, b, nullptr, 0, 0};
    copy.numbers[0] = x, copy.numbers[1] = y, copy.numbers[2] = z;
    flying.push_back(copy);
}
