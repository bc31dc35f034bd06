// Runs kernels/cuda/cross_entropy.cu by instructions.h and compares with sums of its own; an argument says how many schedules are
// tried.
#define EMULATED_THREADS 512
#define EMULATED_PROGRAMS 4
#include "instructions.h"
#include "tiles.cuh"
#include "cross_entropy.cu"

struct Options {
    double smoothing = 0, z = 0, ignored = 0, shift = 0;
    int clusters = 1, most = 1 << 17;
    enum { NOTHING_SPECIAL, BORDERS, INFINITE, NOT_A_NUMBER } special = NOTHING_SPECIAL;
};
// Some hold the label at a border of parts and of pieces, rows that are -inf but for a few columns, a NaN in row 1.
void make_special(u16* x, std::vector<long long>& labels, int columns, int real, int special) {
    int num = labels.size(), quarter = (columns / 8 + 3) / 4 * 8;
    int edge[] = {0, 7, 8, quarter - 1, quarter, 2 * quarter - 1, 3 * quarter, real - 1};
    for (int i = 0; i < num; i++) {
        if (special == Options::BORDERS && i < 8) labels[i] = max(0, min(real - 1, edge[i]));
        if (special != Options::INFINITE) continue;
        labels[i] = 1;
        for (int c = 2; c < real; c++)
            if (c % 3 || c / quarter == 2) x[(long)i * columns + c] = 0xFF80;
    }
    if (special == Options::NOT_A_NUMBER) x[columns + real / 2] = 0x7FC0;
}
// How many things are wrong with a row; its errors raise the largest ones.
long check_row(const u16* before, const u16* after, float found, long long label, int columns, int real, const Options& o,
               double& worst_loss, double& worst) {
    long bad = 0;
    if (label == -100) {
        for (int c = 0; c < columns; c++) bad += after[c] != 0;
        return bad + (found != 0);
    }
    double top = -INFINITY, total = 0, sum = 0;
    bool nan = false;
    for (int c = 0; c < real; c++) top = max(top, (double)low(before[c])), nan |= std::isnan(low(before[c]));
    for (int c = 0; c < real; c++) total += exp(low(before[c]) - top), sum += low(before[c]);
    if (nan) {
        for (int c = 0; c < real; c++) bad += !std::isnan(low(after[c]));
        return bad + !std::isnan(found);
    }
    double lse = top + log(total), spread = o.smoothing / real;
    double loss = lse - (1 - o.smoothing) * low(before[label]) - (o.smoothing ? spread * sum : 0) + o.z * lse * lse;
    double error = fabs(loss - found) / max(1.0, fabs(loss));
    bad += !(error < 1e-5);
    worst_loss = max(worst_loss, error);
    for (int c = 0; c < columns; c++) {
        double g = exp(low(before[c]) - lse) * (1 + 2 * o.z * lse) - spread - (c == label ? 1 - o.smoothing : 0);
        if (c >= real) g = 0;
        double e = fabs(g - low(after[c])), allowed = c < real ? fabs(g) / 256 * 1.02 + 1e-37 : 0;
        if (c < real && (o.smoothing || o.z || c == label)) allowed += 1e-6 * (fabs(g) + (c == label) + spread);
        if (!(e <= allowed) && bad++ < 3) printf("  column %d: %g, not %g\n", c, low(after[c]), g);
        if (fabs(g) > 1e-30) worst = max(worst, e / fabs(g));
    }
    return bad;
}
void trial(const char* name, int num, int columns, int real, const Options& o) {
    std::vector<unsigned char> raw(2l * num * columns + 64);
    u16* x = (u16*)(((u64)raw.data() + 15) & ~15ull);
    std::vector<long long> labels(num);
    std::vector<float> losses(num, NAN);
    std::normal_distribution<float> normal(0, 3);
    for (long i = 0; i < (long)num * columns; i++) x[i] = one(normal(rng) + o.shift);
    for (auto& l : labels) l = rng() % 1000 < o.ignored * 1000 ? -100 : rng() % real;
    make_special(x, labels, columns, real, o.special);
    std::vector<u16> before(x, x + (long)num * columns);
    memory_first = (unsigned char*)x, memory_last = memory_first + 2l * num * columns;
    labels_first = labels.data(), labels_last = labels_first + num;
    kernel = [&] {
        (o.smoothing > 0 ? held_losses_smoothed : held_losses)(x, labels.data(), losses.data(), num, columns, real, -100,
                                                               1 - o.smoothing, o.smoothing / real, o.z, o.most);
    };
    run(min(o.clusters, num));
    double worst_loss = 0, worst = 0;
    long bad = 0;
    for (int i = 0; i < num; i++)
        bad += check_row(&before[(long)i * columns], x + (long)i * columns, losses[i], labels[i], columns, real, o, worst_loss,
                         worst);
    printf("%s %s, %d rows of %d, %d count: loss %.1e gradient %.1e\n", bad ? "FAILED" : "passed", name, num, columns, real,
           worst_loss, worst);
    fflush(stdout);
    if (bad) exit(1);
}
int main(int argc, char** argv) {
    for (int seed = 0; seed < (argc > 1 ? atoi(argv[1]) : 1); seed++) {
        rng.seed(seed);
        trial("one row", 1, 1024, 1024, {});
        trial("8 columns", 9, 8, 8, {.ignored = 0.2, .clusters = 2});
        trial("24 columns", 12, 24, 17, {.smoothing = 0.1, .z = 1e-3, .ignored = 0.2, .clusters = 2, .most = 16});
        trial("more rows", 23, 1024, 1001, {.smoothing = 0.1, .z = 1e-3, .ignored = 0.3, .clusters = 2, .most = 64});
        trial("fewer rows than clusters", 2, 4096, 4095, {.z = 1e-3, .clusters = 33, .most = 4096});
        trial("all ignored", 7, 4096, 4096, {.ignored = 1.1, .most = 4096});
        trial("far below 0", 4, 33024, 32999, {.ignored = 0.1, .shift = -200});
        trial("-inf among them", 3, 33024, 33024, {.shift = -200, .special = Options::INFINITE});
        trial("NaN in a row", 4, 2048, 2048, {.special = Options::NOT_A_NUMBER});
        trial("borders and padding", 9, 4096, 4001, {.smoothing = 0.1, .z = 1e-3, .clusters = 2, .special = Options::BORDERS});
        trial("all that fits", 2, 138240, 138233, {.smoothing = 0.1, .special = Options::BORDERS});
        trial("padding of a whole part", 2, 128256, 90000, {.most = 1 << 12, .special = Options::BORDERS});
    }
}
