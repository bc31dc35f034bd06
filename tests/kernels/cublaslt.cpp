// Stands for libcublasLt: each product multiplies matrices of fp32 in host memory as it was described, and notes what it was given.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>

struct Layout {
    uint64_t rows, columns;
    int64_t lead;
};
struct Algorithm {
    uint64_t data[8];
};
struct Proposal {
    Algorithm algorithm;
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
};
typedef std::map<int, uint64_t> Description;
extern "C" {
uint64_t noted[4];  // number of the algorithm, address and size of the workspace, stream
int num_described = 0;
int cublasLtMatmulDescCreate(void** made, int, int) {
    *made = new Description;
    return 0;
}
int cublasLtMatmulDescSetAttribute(void* description, int attribute, const void* value, size_t size) {
    uint64_t wide = 0;
    memcpy(&wide, value, size);
    (*(Description*)description)[attribute] = wide;
    num_described++;
    return 0;
}
int cublasLtMatrixLayoutCreate(void** made, int, uint64_t rows, uint64_t columns, int64_t lead) {
    *made = new Layout{rows, columns, lead};
    return 0;
}
int cublasLtMatmulPreferenceCreate(void** made) {
    *made = malloc(1);
    return 0;
}
int cublasLtMatmulPreferenceSetAttribute(void*, int, const void*, size_t) { return 0; }
int cublasLtMatmulPreferenceDestroy(void* preference) {
    free(preference);
    return 0;
}
int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, Proposal* found, int* number) {
    *number = 3;
    for (int n = 0; n < 3; n++) found[n] = {{{(uint64_t)(100 + n), 2, 3, 4, 5, 6, 7, (uint64_t)(100 + n)}}, 0, n == 1, 0, {}};
    return 0;
}
// Column-major: d = alpha op(a) op(b) + beta c.
int cublasLtMatmul(void*, void* description, const float* alpha, const float* a, const Layout* la, const float* b,
                   const Layout* lb, const float* beta, const float* c, const Layout* lc, float* d, const Layout* ld,
                   const Algorithm* algorithm, void* workspace, size_t size, void* stream) {
    Description& is = *(Description*)description;
    if (algorithm->data[0] != algorithm->data[7]) return 1;
    noted[0] = algorithm->data[0], noted[1] = (uint64_t)workspace, noted[2] = size, noted[3] = (uint64_t)stream;
    float factor = *alpha;
    for (int attribute : {17, 18})
        if (is.count(attribute)) factor *= *(const float*)is[attribute];
    uint64_t inner = is[3] ? la->rows : la->columns;
    for (uint64_t i = 0; i < ld->rows; i++)
        for (uint64_t j = 0; j < ld->columns; j++) {
            float sum = 0;
            for (uint64_t k = 0; k < inner; k++)
                sum +=
                    (is[3] ? a[k + i * la->lead] : a[i + k * la->lead]) * (is[4] ? b[j + k * lb->lead] : b[k + j * lb->lead]);
            d[i + j * ld->lead] = factor * sum + (*beta ? *beta * c[i + j * lc->lead] : 0);
        }
    return 0;
}
}
