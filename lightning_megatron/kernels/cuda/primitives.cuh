// Instructions of Hopper that C++ has no words for, one function each; ``tests/kernels/instructions.h`` has the same functions for a
// CPU, so that what is made of them can be tried there.
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

struct alignas(64) Map {
    char bytes[128];
};  // CUtensorMap
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
// What the L2 cache is to do with a line: as createpolicy.fractional makes it of evict_normal, evict_first and evict_last.
constexpr u64 ORDINARY = 0x1000000000000000ull, FIRST_OUT = 0x12F0000000000000ull, LAST_OUT = 0x14F0000000000000ull;
__device__ __forceinline__ void load(u32 to, const Map* map, int x, int y, u32 b, u64 cache) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;"
        :
        : "r"(to), "l"(map), "r"(x), "r"(y), "r"(b), "l"(cache)
        : "memory");
}
__device__ __forceinline__ void load_both(u32 to, const Map* map, int x, int y, u32 b, u64 cache) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5, %6;"
        :
        : "r"(to), "l"(map), "r"(x), "r"(y), "r"(b), "h"((u16)3), "l"(cache)
        : "memory");
}
__device__ __forceinline__ void send(const Map* map, int x, int y, u32 from, u64 cache = ORDINARY) {
    asm volatile(
        "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group.L2::cache_hint [%0, {%1, %2}], [%3], %4;\ncp.async.bulk.commit_group;"
        :
        : "l"(map), "r"(x), "r"(y), "r"(from), "l"(cache)
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
// As ``multiply``, of numbers of 8 bits, K last in both.
__device__ __forceinline__ void multiply_narrow(float (&d)[128], u64 a, u64 b, int add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k32.f32.e4m3.e4m3 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"
        "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,"
        "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
        "}, %128, %129, p, 1, 1;\n}"
        : D64(0), D64(64)
        : "l"(a), "l"(b), "r"(add));
}
__device__ __forceinline__ void multiplies_begin() { asm volatile("wgmma.fence.sync.aligned;" : : : "memory"); }
__device__ __forceinline__ void multiplies_commit() { asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory"); }
template <int N>
__device__ __forceinline__ void multiplies_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(N) : "memory");
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
__device__ __forceinline__ void put(u32 at, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 :
                 : "r"(at), "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}
__device__ __forceinline__ void put_two(u32 at, float a, float b) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" : : "r"(at), "f"(a), "f"(b) : "memory");
}
__device__ __forceinline__ void read(u32 at, u32 (&v)[4]) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "r"(at)
                 : "memory");
}
__device__ __forceinline__ uint4 fetch(const u16* p) {  // in order, so that several are under way before the first is used
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ void store(u16* p, const u32 (&v)[4], u64 cache) {
    asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, %5;"
                 :
                 : "l"(p), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]), "l"(cache)
                 : "memory");
}
__device__ __forceinline__ void prefetch_line(const void* p) { asm volatile("prefetch.global.L2 [%0];" : : "l"(p)); }
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
__device__ __forceinline__ void barriers_made() { asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory"); }
__device__ __forceinline__ void put_chunk(u32 at, const u32 (&v)[4]) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" : : "r"(at), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
}
// By the instructions that Triton makes of ``tl.sigmoid``: what is rounded to few bits must be the same bits before. Flushing the
// smallest exponentials changes nothing, as 1 is added.
__device__ __forceinline__ float sigmoid_as_triton(float x) {
    float e, s;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x * -1.44269502162933349609375f));
    asm("div.full.f32 %0, 0f3F800000, %1;" : "=f"(s) : "f"(e + 1.0f));
    return s;
}
// Four numbers in e4m3, the first in the lowest byte. What exceeds it becomes its largest number, NaN stays NaN.
__device__ __forceinline__ u32 narrowed(float a, float b, float c, float d) {
    u32 word;
    asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\ncvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\nmov.b32 %0, {low, high};\n}"
        : "=r"(word)
        : "f"(a), "f"(b), "f"(c), "f"(d));
    return word;
}
__device__ __forceinline__ void store_two(unsigned char* p, const u32 (&v)[2]) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(v[0]), "r"(v[1]) : "memory");
}
__device__ __forceinline__ void store_one(unsigned char* p, u32 v) {
    asm volatile("st.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ float power(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ u32 larger(u32 a, u32 b) {
    u32 c;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}
__device__ __forceinline__ u32 read_one(u32 at) {
    u16 v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(at) : "memory");
    return v;
}
__device__ __forceinline__ void write_one(u32 at, u32 v) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(at), "h"((u16)v) : "memory");
}
__device__ __forceinline__ long long label_at(const long long* p) {  // in order, so that it is under way before it is used
    long long v;
    asm volatile("ld.global.s64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ u64 used_once() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
    return policy;
}
__device__ __forceinline__ void copy_in(u32 to, const void* from, u32 bytes, u32 b, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to),
        "l"(from), "r"(bytes), "r"(b), "l"(policy)
        : "memory");
}
__device__ __forceinline__ void copy_out(void* to, u32 from, u32 bytes, u64 policy) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(to), "r"(from),
                 "r"(bytes), "l"(policy)
                 : "memory");
}
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Three numbers to a cell of a program of the cluster; its barrier is told 16 bytes.
__device__ __forceinline__ void tell(u32 cell, u32 b, u32 rank, float x, float y, float z) {
    asm volatile(
        "{\n.reg .b32 there, signal;\nmapa.shared::cluster.u32 there, %0, %2;\nmapa.shared::cluster.u32 signal, %1, %2;\n"
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [there], {%3, %4, %5, %6}, [signal];\n}" ::"r"(cell),
        "r"(b), "r"(rank), "r"(__float_as_uint(x)), "r"(__float_as_uint(y)), "r"(__float_as_uint(z)), "r"(0u)
        : "memory");
}
