// CUDA threads on a CPU: each is a fiber; warps go on in any order, and what has been sent lands in any order. A deadlock ends the
// program with a word. What threads do is in instructions.h.
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <vector>
using std::max;
using std::min;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
#define __device__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __shared__
#define __align__(n)
#define __cluster_dims__(...)
#define __launch_bounds__(...)
struct Dim {
    unsigned x;
};
Dim threadIdx, blockIdx, gridDim;
struct uint4 {
    u32 x, y, z, w;
};
struct float4 {
    float x, y, z, w;
};
float4 __ldg(const float4* p) { return *p; }
char memory[1];
#ifndef EMULATED_THREADS
#define EMULATED_THREADS 384
#define EMULATED_PROGRAMS 2
#endif
constexpr int SMEM = 232448, T = EMULATED_THREADS, P = EMULATED_PROGRAMS;  // bytes of shared memory, threads of a program,
                                                                           // programs of a cluster
constexpr u32 NOT_WRITTEN = 0x7FC0;  // NaN: what results hold before they are written, once
struct Map {
    unsigned char* p;
    int rows, columns, size, box_rows, box_columns;
};
struct Bar {  // an mbarrier
    int count, pending;
    long tx;
    u32 phase;
};
struct Op {  // one product of 64 x 256 x 16, or 32 in 8 bits, of one thread
    int add;
    u64 a, b;
    bool ta, tb;
    float* d;
    bool narrow = false;
};
struct Cta {  // a program
    std::vector<unsigned char> smem;
    std::vector<Bar> bars;
    int left = T;  // threads that have not ended
    int finishing = 0;
    u32 finishing_round = 0;
    int group[2] = {};
    u32 group_round[2] = {};
};
std::vector<Cta> cta;
std::mt19937 rng(1);
[[noreturn]] void wrong(const char* what) {
    printf("WRONG: %s (block %u thread %u)\n", what, blockIdx.x, threadIdx.x);
    exit(1);
}
struct Warp {
    int arrived = 0;
    u32 round = 0;
    u32 at[2][32];
};
std::vector<Warp> warps;
std::vector<int> cluster_arrived;
std::vector<u32> cluster_round;
// What a thread waits for: nothing, a barrier, its warp, its cluster, that what it sent has been read, its warpgroup, the
// finishing warps; or it has ended.
enum Kind { READY, BAR, WARP, CLUSTER, READS, GROUP, FINISHERS, OVER };
struct Fiber {
    ucontext_t context;
    Kind kind;
    Bar* bar;
    u32 value;
    int block, thread, unread;
    std::vector<char> stack;
    std::vector<std::vector<Op>> groups;
    std::vector<Op> open;
};
std::vector<Fiber> fibers;
Fiber* now;
ucontext_t main_context;
Cta& here() { return cta[now->block]; }
void pause(Kind k) {
    now->kind = k;
    swapcontext(&now->context, &main_context);
}
bool able(Fiber& f) {
    switch (f.kind) {
        case READY:
            return true;
        case BAR:
            return (f.bar->phase & 1) != f.value;
        case WARP:
            return warps[f.block * (T / 32) + f.thread / 32].round != f.value;
        case CLUSTER:
            return cluster_round[f.block / P] != f.value;
        case READS:
            return f.unread == 0;
        case FINISHERS:
            return cta[f.block].finishing_round != f.value;
        case GROUP:
            return cta[f.block].group_round[f.thread / 128] != f.value;
        default:
            return false;
    }
}
enum Way { LOAD, STORE, ADD, NUMBER, BULK_LOAD, BULK_STORE, NUMBERS };
struct Copy {
    Way kind;
    int block;
    Fiber* by;
    u32 to, b;
    const Map* map;
    int x, y, value = 0;
    unsigned char* far = nullptr;
    u32 bytes = 0;
    float numbers[4] = {};
};
std::vector<Copy> flying;
void land(Copy m);

std::function<void()> kernel;
void body() {
    kernel();
    now->kind = OVER;
    here().left--;
    swapcontext(&now->context, &main_context);
}
void run(int clusters) {
    int blocks = P * clusters;
    gridDim.x = blocks;
    cta.assign(blocks, Cta());
    warps.assign(blocks * T / 32, Warp());
    cluster_arrived.assign(clusters, 0);
    cluster_round.assign(clusters, 0);
    flying.clear();
    for (auto& c : cta) {
        c.smem.assign(SMEM, 0xFF);
        c.bars.assign(SMEM / 8, Bar{0, 0, 0, 0});
    }
    fibers.resize(blocks * T);
    for (int i = 0; i < blocks * T; i++) {
        Fiber& f = fibers[i];
        if (f.stack.empty()) f.stack.resize(1 << 15);
        f.block = i / T;
        f.thread = i % T;
        f.kind = READY;
        f.unread = 0;
        f.groups.clear();
        f.open.clear();
        getcontext(&f.context);
        f.context.uc_stack.ss_sp = f.stack.data();
        f.context.uc_stack.ss_size = f.stack.size();
        f.context.uc_link = nullptr;
        makecontext(&f.context, body, 0);
    }
    std::vector<int> order(blocks * T / 32);
    for (size_t i = 0; i < order.size(); i++) order[i] = i;
    int mode = rng() % 3;
    std::vector<int> lazy(order.size());
    for (auto& l : lazy) l = rng() % 3 ? 0 : rng() % 6;
    auto deliver = [&](int n) {
        while (n-- > 0 && !flying.empty()) {
            size_t i = rng() % flying.size();
            Copy m = flying[i];
            flying[i] = flying.back();
            flying.pop_back();
            land(m);
        }
    };
    for (;;) {
        bool moved = false;
        std::shuffle(order.begin(), order.end(), rng);
        for (int w : order) {
            if (lazy[w] && rng() % (lazy[w] + 1)) {
                for (int i = 0; i < 32; i++) moved |= fibers[w * 32 + i].kind != OVER && able(fibers[w * 32 + i]);
                continue;
            }
            for (int i = 0; i < 32; i++) {
                Fiber& f = fibers[w * 32 + i];
                if (f.kind == OVER || !able(f)) continue;
                moved = true;
                now = &f;
                blockIdx.x = f.block;
                threadIdx.x = f.thread;
                f.kind = READY;
                swapcontext(&main_context, &f.context);
            }
            if (mode == 0 && rng() % 4 == 0) deliver(1 + rng() % 3);
        }
        if (std::all_of(fibers.begin(), fibers.end(), [](const Fiber& f) { return f.kind == OVER; })) break;
        if (mode == 1) deliver(1 << 20);
        if (!moved && std::any_of(fibers.begin(), fibers.end(), [](Fiber& f) { return f.kind != OVER && able(f); })) continue;
        if (!moved) {
            if (flying.empty()) {
                for (auto& f : fibers)
                    if (f.thread % 32 == 0 && f.kind != OVER) {
                        u32 at = f.kind == BAR ? (u32)(f.bar - cta[f.block].bars.data()) * 8 : 0;
                        printf("unread %d moved ", f.unread);
                        printf("block %d warp %d kind %d bar %u value %u phase %u pending %d tx %ld\n", f.block, f.thread / 32,
                               f.kind, at, f.value, f.kind == BAR ? f.bar->phase : 0, f.kind == BAR ? f.bar->pending : 0,
                               f.kind == BAR ? f.bar->tx : 0);
                    }
                wrong("deadlock");
            }
            deliver(1 + rng() % 2);
        }
    }
    if (!flying.empty()) wrong("copies are left");
}
