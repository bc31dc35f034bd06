// Runs kernels/cuda/products.cu by instructions.h and compares with sums of its own; an argument says how many schedules are tried.
#include "instructions.h"
#include "tiles.cuh"
#include "rotation.cuh"
#include "products.cu"
#include "rotated_narrow.cu"
#include "gated_narrow.cu"

typedef std::vector<u16> Half;
std::normal_distribution<float> normal;
u16* aligned(Half& h, long n, float scale, bool empty = false) {
    h.resize(n + 16);
    u16* p = (u16*)(((u64)h.data() + 31) & ~31ull);
    for (long i = 0; i < n; i++) p[i] = empty ? NOT_WRITTEN : one(normal(rng) * scale);
    return p;
}
float f(u16 x) { return low(x); }
int counters[2];  // zeros behind each kernel
void none_left() {
    if (counters[0] || counters[1]) wrong("counters");
}
long bad;
double worst;
void close_to(double got, double want, double scale) {
    double e = fabs(got - want) / (fabs(want) + scale);
    worst = max(worst, e);
    if (!(e < 0.012)) {
        if (bad++ < 6) printf("  %g, not %g\n", got, want);
    }
}
void said(const char* what, int M, int N, int K, int c) {
    printf("%s %s M %d N %d K %d clusters %d: %.1e\n", bad ? "FAILED" : "passed", what, M, N, K, c, worst);
    fflush(stdout);
    if (bad) exit(1);
    worst = 0;
}
Map map(u16* p, int r, int c, int br, int bc) { return {(unsigned char*)p, r, c, 2, br, bc}; }
void gated(int M, int F, int K, int c, int group) {
    Half a, b, e, g, h, i, j;
    u16 *x = aligned(a, (long)M * K, 1), *w = aligned(b, 2l * F * K, 0.1), *both = aligned(e, 2l * M * F, 1, true),
        *act = aligned(g, (long)M * F, 1, true);
    Map mx = map(x, M, K, 128, 64), mw = map(w, 2 * F, K, 128, 64), mb = map(both, M, 2 * F, 64, 64);
    kernel = [&] { gated_forward(mx, mw, mb, act, M, F, K, group, counters); };
    run(c);
    none_left();
    for (int r = 0; r < M; r++)
        for (int n = 0; n < F; n++) {
            double q[2] = {};
            for (int s = 0; s < 2; s++) {
                for (int k = 0; k < K; k++) q[s] += f(x[(long)r * K + k]) * f(w[(long)(s * F + n) * K + k]);
                close_to(f(both[(long)r * 2 * F + s * F + n]), q[s], 0.05);
            }
            float gate = f(both[(long)r * 2 * F + n]), up = f(both[(long)r * 2 * F + F + n]);
            close_to(f(act[(long)r * F + n]), gate / (1 + exp(-gate)) * up, 1e-3);
        }
    said("gated_forward", M, F, K, c);
    u16 *grad = aligned(h, (long)M * K, 1), *down = aligned(i, (long)K * F, 0.1), *made = aligned(j, 2l * M * F, 1, true);
    Map mg = map(grad, M, K, 128, 64), md = map(down, K, F, 64, 64);
    kernel = [&] { gated_backward(mg, md, both, made, M, F, K, group, counters); };
    run(c);
    none_left();
    for (int r = 0; r < M; r++)
        for (int n = 0; n < F; n++) {
            double o = 0;
            for (int k = 0; k < K; k++) o += f(grad[(long)r * K + k]) * f(down[(long)k * F + n]);
            float gate = f(both[(long)r * 2 * F + n]), up = f(both[(long)r * 2 * F + F + n]), s = 1 / (1 + exp(-gate));
            close_to(f(made[(long)r * 2 * F + n]), o * up * s * (1 + gate * (1 - s)), 0.05);
            close_to(f(made[(long)r * 2 * F + F + n]), o * gate * s, 0.05);
        }
    said("gated_backward", M, F, K, c);
}
void plain(int M, int N, int K, int c, int group) {
    Half a, b, e;
    u16 *x = aligned(a, (long)M * K, 1), *w = aligned(b, (long)K * N, 0.1), *out = aligned(e, (long)M * N, 1, true);
    Map mx = map(x, M, K, 128, 64), mw = map(w, K, N, 64, 64), mo = map(out, M, N, 64, 64);
    kernel = [&] { plain_turned(mx, mw, mo, M, N, K, group, counters); };
    run(c);
    none_left();
    for (int r = 0; r < M; r++)
        for (int n = 0; n < N; n++) {
            double q = 0;
            for (int k = 0; k < K; k++) q += f(x[(long)r * K + k]) * f(w[(long)k * N + n]);
            close_to(f(out[(long)r * N + n]), q, 0.05);
        }
    said("plain_turned", M, N, K, c);
}
void weight(int M, int N, int K, int c, int group) {
    Half a, b;
    u16 *g = aligned(a, (long)K * M, 1), *x = aligned(b, (long)K * N, 0.1);
    std::vector<float> total((long)M * N, NAN);
    Map mg = map(g, K, M, 64, 64), mx = map(x, K, N, 64, 64), mt = {(unsigned char*)total.data(), M, N, 4, 64, 32};
    for (int adds = 0; adds < 2; adds++) {
        kernel = [&] { weight_gradient(mg, mx, mt, adds, M, N, K, group, counters); };
        run(c);
        none_left();
    }
    for (int r = 0; r < M; r++)
        for (int n = 0; n < N; n++) {
            double q = 0;
            for (int k = 0; k < K; k++) q += f(g[(long)k * M + r]) * f(x[(long)k * N + n]);
            close_to(total[(long)r * N + n], 2 * q, 0.01);
        }
    said("weight_gradient", M, N, K, c);
}
// Bytes that are numbers of magnitude 1, in e4m3.
unsigned char* bytes(Half& h, long n) {
    unsigned char* p = (unsigned char*)aligned(h, n / 2, 1);
    for (long i = 0; i < n; i++) p[i] = rng() % 64 + (rng() % 2 ? 128 : 0);
    return p;
}
void rotating(int M, int heads, int kv, int size, int batch, int K, int c, int group, bool narrow = false) {
    int N = (heads + 2 * kv) * size, turned = (heads + kv) * size;
    Half a, b, e;
    u16 *x = aligned(a, (long)M * K, 1), *w = aligned(b, (long)N * K, 0.1), *out = aligned(e, (long)M * N, 1, true);
    unsigned char *xb = narrow ? bytes(a, (long)M * K) : nullptr, *wb = narrow ? bytes(b, (long)N * K) : nullptr;
    float inverses[2] = {0.5f, 0.125f};  // of the factors
    std::vector<float> cs_raw(M / batch * size + 8), sn_raw(M / batch * size + 8);
    float *cs = (float*)(((u64)cs_raw.data() + 15) & ~15ull), *sn = (float*)(((u64)sn_raw.data() + 15) & ~15ull);
    for (int p = 0; p < M / batch; p++)
        for (int k = 0; k < size / 2; k++) {
            float t = normal(rng);
            cs[p * size + k] = cs[p * size + size / 2 + k] = cosf(t);
            sn[p * size + k] = sn[p * size + size / 2 + k] = sinf(t);
        }
    Map mx = map(x, M, K, 128, 64), mw = map(w, N, K, 128, 64), mo = map(out, M, N, 64, 64);
    if (narrow) mx = map((u16*)xb, M, K / 2, 128, 64), mw = map((u16*)wb, N, K / 2, 128, 64);
    kernel = [&] { (size == 64 ? rotated_64 : rotated_128)(mx, mw, mo, cs, sn, turned, batch, M, N, K, group, counters); };
    if (narrow)
        kernel = [&] {
            (size == 64 ? rotated_narrow_64 : rotated_narrow_128)(mx, mw, mo, inverses, inverses + 1, cs, sn, turned, batch, M,
                                                                  N, K, group, counters);
        };
    run(c);
    none_left();
    std::vector<double> row(N);
    for (int r = 0; r < M; r++) {
        for (int n = 0; n < N; n++) {
            double q = 0;
            for (int k = 0; k < K; k++)
                q += narrow ? of_e4m3(xb[(long)r * K + k]) * of_e4m3(wb[(long)n * K + k]) / 16
                            : f(x[(long)r * K + k]) * f(w[(long)n * K + k]);
            row[n] = q;
        }
        for (int n = 0; n < N; n++) {
            int k = n % size, half = size / 2;
            double want = row[n], C = cs[r / batch * size + k], S = sn[r / batch * size + k];
            if (n < turned) want = k < half ? row[n] * C - row[n + half] * S : row[n] * C + row[n - half] * S;
            close_to(f(out[(long)r * N + n]), want, 1.0);
        }
    }
    said(narrow ? "rotated_narrow" : "rotated", M, N, K, c);
}
void gating_narrow(int M, int F, int K, int c, int group, bool guesses) {
    Half a, b, e, g, h;
    unsigned char *x = bytes(a, (long)M * K), *w = bytes(b, 2l * F * K), *rows = (unsigned char*)aligned(g, (long)M * F / 2, 1),
                  *columns = (unsigned char*)aligned(h, (long)M * F / 2, 1);
    u16* both = aligned(e, 2l * M * F, 1, true);
    memset(rows, BYTE_NOT_WRITTEN, (long)M * F);
    memset(columns, BYTE_NOT_WRITTEN, (long)M * F);
    float inverses[2] = {0.5f, 0.125f}, scale = 64.0f, inverse[2] = {}, largest = 0;  // some numbers are too large for e4m3
    int amax = 0;
    Map mx = map((u16*)x, M, K / 2, 128, 64), mw = map((u16*)w, 2 * F, K / 2, 128, 64), mb = map(both, M, 2 * F, 64, 64);
    kernel = [&] {
        gated_narrow_forward(mx, mw, mb, inverses, inverses + 1, rows, columns, inverse, &scale, &amax, guesses, M, F, K, group,
                             counters);
    };
    run(c);
    none_left();
    for (int r = 0; r < M; r++)
        for (int n = 0; n < F; n++) {
            double q[2] = {};
            for (int s = 0; s < 2; s++) {
                for (int k = 0; k < K; k++) q[s] += of_e4m3(x[(long)r * K + k]) * of_e4m3(w[(long)(s * F + n) * K + k]) / 16;
                close_to(f(both[(long)r * 2 * F + s * F + n]), q[s], 1.0);
            }
            float gate = f(both[(long)r * 2 * F + n]), up = f(both[(long)r * 2 * F + F + n]), made = gate * sigmoid(gate) * up;
            largest = max(largest, fabsf(made));
            bad += rows[(long)r * F + n] != to_e4m3(made * scale) || columns[(long)n * M + r] != rows[(long)r * F + n];
        }
    bad += __uint_as_float(amax) != largest || inverse[1] != (guesses ? scale : 0) || inverse[0] != 0;
    said("gated_narrow", M, F, K, c);
}
int main(int argc, char** argv) {
    for (int seed = 0; seed < (argc > 1 ? atoi(argv[1]) : 1); seed++) {
        rng.seed(seed);
        weight(256, 256, 64, 1, 8);
        weight(512, 256, 256, 2, 1);
        plain(256, 256, 64, 1, 8);
        plain(512, 512, 192, 2, 8);
        gated(256, 256, 64, 1, 8);
        gated(512, 256, 320, 3, 2);
        rotating(256, 2, 2, 128, 1, 64, 1, 8);
        rotating(512, 4, 4, 64, 2, 128, 2, 8);
        rotating(256, 2, 2, 128, 1, 256, 2, 4, true);
        rotating(256, 4, 4, 64, 2, 128, 1, 8, true);
        gating_narrow(256, 256, 256, 2, 8, false);
        gating_narrow(512, 128, 128, 1, 1, true);
    }
}
