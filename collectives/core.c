/* gangline._core: collectives through the slots of a host, and sums of several arrays in one pass over memory.
 *
 * Optional: Python does the same, with the same bits. The slots and their marks are those of transports/shm/slots.py.
 * No exchange and no sum allocates memory or waits for long: after some yields Python waits, with its deadlines. */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#pragma GCC diagnostic ignored "-Wunused-parameter" /* Python passes the module to all functions */

#if defined(__SSE2__)
#include <emmintrin.h>
#else
#define _mm_pause() (void)0
#endif

enum { DONE = 0, NOT_YET = -1, ELSEWHERE = -2, DECLINED = -3, HELD = -4 };
enum { SEQUENCE, BYTES, RUNNING, LOCKED, QUEUED, ENDED, LIMITS, WORDS = LIMITS + 9 }; /* of compiled_core */
enum { CALLS_PER_POLL = 256 /* the watchdog's */, FIRST_LOOKS = 50 /* before others may run; one takes some 20 ns */ };
enum { SUM, MEAN, PRODUCT, MIN, MAX };              /* call_signature.OPS */
enum { F32, F64, F16, BF16, I8, I16, I32, I64, U8, DTYPES, BOOL = DTYPES, C64, C128, ALL_DTYPES }; /* its DTYPES */
enum { ALL_REDUCE, BROADCAST = 2, ALL_GATHER, REDUCE_SCATTER, BARRIER = 8 };                      /* its COLLECTIVES */
enum { MOST_OPERANDS = 1024, BLOCK = 1024, STREAMED_BLOCK = 64 }; /* elements at a time: within a cache; past all */
static const size_t ITEM[ALL_DTYPES] = {4, 8, 2, 2, 1, 2, 4, 8, 1, 1, 8, 16};
/* Bytes from which a copy into a slot may bypass the cache, and from which other threads of the process may run. */
static const size_t STREAM_BYTES = 1 << 14, RELEASE_BYTES = 1 << 15;
enum { WRITE, READ, SIZES = 6, TRIAL_CALLS = 32 }; /* uses of a slot; kinds of sizes; copies until the next trial */
/* Bytes of a chunk above a slot, which fits two ranks' caches; from which more than two ranks reduce a part each. */
static const int64_t CHUNK_BYTES = 1 << 19, BY_PART_BYTES = 1 << 16;
static const int64_t YIELD_NANOSECONDS = 5000000; /* after which Python waits */

/* ---- Arithmetic ---- */

#define LOOP(T, EXPRESSION)                                                                        \
    {                                                                                              \
        const T *x = a, *y = b;                                                                    \
        T *z = out, u, v;                                                                          \
        _Pragma("GCC ivdep") for (size_t i = 0; i < n; i++) u = x[i], v = y[i], z[i] = (T)(EXPRESSION); \
        break;                                                                                     \
    }
/* out may be a or b. NaN wins, as in numpy and torch. */
#define ANYWHERE __attribute__((aligned(1), may_alias)) /* a tensor may begin at an odd address */
#define FOLD(TYPE, NAME, TARGET)                                                                  \
    TARGET static void NAME##_##TYPE(void *out, const void *a, const void *b, size_t n, int op) { \
        typedef TYPE ANYWHERE T;                                                                  \
        switch (op) {                                                                             \
        case PRODUCT: LOOP(T, u *v)                                                               \
        case MIN: LOOP(T, u < v || u != u ? u : v)                                                \
        case MAX: LOOP(T, u > v || u != u ? u : v)                                                \
        default: LOOP(T, u + v)                                                                   \
        }                                                                                         \
    }
#define FOLDS(NAME, TARGET)                                                                                        \
    FOLD(float, NAME, TARGET) FOLD(double, NAME, TARGET) FOLD(int8_t, NAME, TARGET) FOLD(int16_t, NAME, TARGET)    \
    FOLD(int32_t, NAME, TARGET) FOLD(int64_t, NAME, TARGET) FOLD(uint8_t, NAME, TARGET)                            \
    static Fold *const NAME[DTYPES] = {NAME##_float,   NAME##_double,  NAME##_float,   NAME##_float, NAME##_int8_t, \
                                       NAME##_int16_t, NAME##_int32_t, NAME##_int64_t, NAME##_uint8_t};
typedef void Fold(void *, const void *, const void *, size_t, int);
FOLDS(portable, )
#if defined(__x86_64__)
FOLDS(wide, __attribute__((target("avx2"))))
#endif
static Fold *const *folds = portable; /* by dtype; those of this processor after PyInit__core */

typedef union { float value; uint32_t bits; } Single;
typedef double ANYWHERE Double;
typedef float ANYWHERE Float;
typedef uint16_t ANYWHERE Half;
static inline float float_of(uint32_t bits) { return (Single){.bits = bits}.value; }
static inline uint32_t bits_of(float value) { return (Single){.value = value}.bits; }

static void widen(Float *restrict out, const Half *restrict in, size_t n, int dtype) {
    for (size_t i = 0; i < n && dtype == BF16; i++) out[i] = float_of((uint32_t)in[i] << 16);
    for (size_t i = 0; i < n && dtype == F16; i++) {
        uint32_t half = in[i], exponent = half >> 10 & 31, fraction = half & 1023;
        uint32_t normal = (exponent == 31 ? 0x7F800000 : (exponent + 112) << 23) | fraction << 13;
        uint32_t subnormal = bits_of((float)(int32_t)fraction * 0x1p-24f);
        out[i] = float_of((exponent ? normal : subnormal) | (half & 0x8000) << 16);
    }
}

static void narrow(Half *restrict out, const Float *restrict in, size_t n, int dtype) { /* to nearest, ties to even */
    for (size_t i = 0; i < n && dtype == BF16; i++) {
        uint32_t bits = bits_of(in[i]);
        out[i] = in[i] != in[i] ? 0x7FC0 : (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
    }
    for (size_t i = 0; i < n && dtype == F16; i++) {
        uint32_t bits = bits_of(in[i]), size = bits & 0x7FFFFFFF;
        uint32_t large = size > 0x7F800000 ? 0x7E00 : 0x7C00;             /* NaN, and 65,536 or more */
        uint32_t subnormal = bits_of(float_of(size) + 0.5f) - 0x3F000000; /* 0.5 has the unit 2**-24 */
        uint32_t normal = (size - 0x38000000 + 0xFFF + (size >> 13 & 1)) >> 13;
        uint32_t half = size >= 0x47800000 ? large : size < 0x38800000 ? subnormal : normal;
        out[i] = (uint16_t)(half | (bits >> 16 & 0x8000));
    }
}

/* Copy memory that does not overlap, past the cache if "streams" (then a fence comes before others may read it). */
static void copy(char *to, const char *from, size_t n, int streams) {
#if defined(__SSE2__)
    if (streams) {
        size_t head = (size_t)(-(uintptr_t)to & 15), i = head < n ? head : n;
        memcpy(to, from, i);
        for (; i + 64 <= n; i += 64) {
            __m128i line[4];
            memcpy(line, from + i, sizeof line);
            for (int j = 0; j < 4; j++) _mm_stream_si128((__m128i *)(to + i) + j, line[j]);
        }
        to += i, from += i, n -= i;
    }
#endif
    memcpy(to, from, n);
}

typedef struct { int dtype, op; int64_t divisor; /* of the result; 1: none */ } Reduction;

static void divide(void *values, size_t n, const Reduction *how) {
    if (how->divisor == 1) return;
    Double *doubles = values; Float *floats = values;
    for (size_t i = 0; i < n && how->dtype == F64; i++) doubles[i] /= (double)how->divisor;
    for (size_t i = 0; i < n && how->dtype != F64; i++) floats[i] /= (float)how->divisor;
}

/* Reduce n elements of p inputs in their order, and write every one of m outputs; an output may be an input, and is
   then written through the cache, which holds it. float16 and bfloat16 are reduced in float32 and rounded once. */
static void reduce(const Reduction *how, const char *const *in, size_t p, char *const *out, size_t m, size_t n,
                   int streams) {
    const size_t item = ITEM[how->dtype];
    Fold *fold = folds[how->dtype];
    const int is_half = how->dtype == F16 || how->dtype == BF16;
    if (p == 2 && m == 1 && !streams && !is_half)
        return fold(out[0], in[0], in[1], n, how->op), divide(out[0], n, how);
    _Alignas(64) char sums[8 * BLOCK], operand[8 * BLOCK], past[MOST_OPERANDS];
    for (size_t j = 0; j < m; j++) {
        past[j] = (char)(streams && (uintptr_t)out[j] % 16 == 0);
        for (size_t r = 0; r < p; r++) past[j] = (char)(past[j] && in[r] != out[j]);
    }
    const size_t block = streams ? STREAMED_BLOCK : BLOCK;
    for (size_t begin = 0; begin < n; begin += block) {
        size_t count = n - begin < block ? n - begin : block, offset = begin * item;
        const char *result = sums;
        if (is_half) {
            widen((Float *)sums, (const Half *)(in[0] + offset), count, how->dtype);
            for (size_t r = 1; r < p; r++) {
                widen((Float *)operand, (const Half *)(in[r] + offset), count, how->dtype);
                fold(sums, sums, operand, count, how->op);
            }
            divide(sums, count, how);
            narrow((Half *)operand, (const Float *)sums, count, how->dtype);
            result = operand;
        } else {
            if (p == 1) memcpy(sums, in[0] + offset, count * item);
            else fold(sums, in[0] + offset, in[1] + offset, count, how->op);
            for (size_t r = 2; r < p; r++) fold(sums, sums, in[r] + offset, count, how->op);
            divide(sums, count, how);
        }
        for (size_t j = 0; j < m; j++) copy(out[j] + offset, result, count * item, past[j]);
    }
    if (streams) atomic_thread_fence(memory_order_seq_cst);
}

/* ---- Slots ---- */

typedef struct {
    _Atomic int64_t *marks[2]; /* by parity: count, sequence, code, whether the slot was written past the cache */
    char *slots[2];
    _Atomic int64_t *asleep; /* 1 while the rank sleeps until this one wakes it */
} Peer;

typedef struct {
    int64_t size, rank, slot_bytes, looks, yields; /* looks before the first yield; yields before NOT_YET */
    _Atomic int32_t *futex;                        /* this rank's, on which the others sleep */
    Peer peers[];
} Group;

/* A collective, and how it is done. */
typedef struct {
    int64_t count, code; /* elements of the larger tensor; CallSignature.code */
    int64_t chunk;       /* elements of one exchange */
    Reduction how;
    int collective, root, by_part; /* 1: each rank reduces its part of a chunk and publishes it; 0: each reduces all */
} Call;

typedef struct {
    int64_t exchanges; /* so far */
    Call call;         /* the rest: the call that runs, or the last one */
    char *source, *out;
    int64_t sequence, done; /* elements */
    int is_second;          /* the parts' results have been published, in place of the operands */
    int streams;            /* whether the slot was written past the cache */
    float costs[SIZES][2][2]; /* by size, by that, and by use: ns per byte; 0: not known */
    unsigned copies;
    Group *group;
} Slots;

static void close_slots(PyObject *capsule) { PyMem_Free(PyCapsule_GetPointer(capsule, "slots")); }

static PyObject *open_slots(PyObject *module, PyObject *packed) {
    char *words;
    Py_ssize_t nbytes;
    if (PyBytes_AsStringAndSize(packed, &words, &nbytes) < 0) return NULL;
    int64_t size = 0;
    if (nbytes >= (Py_ssize_t)sizeof(Group)) memcpy(&size, words, sizeof size);
    if (size < 1 || size > MOST_OPERANDS || nbytes != (Py_ssize_t)(sizeof(Group) + (size_t)size * sizeof(Peer)))
        return PyErr_Format(PyExc_ValueError, "%zd bytes describe no group of 1 to %d ranks", nbytes, MOST_OPERANDS);
    Slots *slots = PyMem_Calloc(1, sizeof *slots + (size_t)nbytes);
    if (slots == NULL) return PyErr_NoMemory();
    slots->group = memcpy(slots + 1, words, (size_t)nbytes);
    PyObject *capsule = PyCapsule_New(slots, "slots", close_slots);
    if (capsule == NULL) PyMem_Free(slots);
    return capsule;
}

/* Publish this rank's slot, which holds what the others are to read. */
static void publish(Slots *slots) {
    const Group *group = slots->group;
    int64_t count = ++slots->exchanges;
    _Atomic int64_t *mark = group->peers[group->rank].marks[count & 1];
    atomic_store_explicit(mark + 1, slots->sequence, memory_order_relaxed);
    atomic_store_explicit(mark + 2, slots->call.code, memory_order_relaxed);
    atomic_store_explicit(mark + 3, slots->streams, memory_order_relaxed);
    atomic_store_explicit(mark, count, memory_order_seq_cst); /* before "asleep" is read */
    for (int64_t r = 0; r < group->size; r++)
        if (r != group->rank && atomic_load_explicit(group->peers[r].asleep, memory_order_seq_cst)) {
            atomic_store(group->futex, (atomic_load(group->futex) + 1) & 0x7FFFFFFF);
            syscall(SYS_futex, group->futex, FUTEX_WAKE, 1 << 30, NULL, NULL, 0); /* wakes all of them */
            break;
        }
}

static int look(const Slots *slots, int64_t looks) {
    const Group *group = slots->group;
    int64_t count = slots->exchanges;
    for (int64_t r = 0; r < group->size; r++) {
        _Atomic int64_t *mark = group->peers[r].marks[count & 1];
        for (; atomic_load_explicit(mark, memory_order_acquire) != count; _mm_pause())
            if (--looks < 0) return NOT_YET;
    }
    return DONE;
}

static int64_t nanoseconds(void) {
    struct timespec now = {0};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static _Thread_local int64_t most_yields = INT64_MAX; /* of this thread */

/* Wait a little for all ranks to publish, and compare their calls. */
static int await(const Slots *slots, int holds_gil) {
    const Group *group = slots->group;
    int found = look(slots, group->looks < FIRST_LOOKS ? group->looks : FIRST_LOOKS);
    if (found == NOT_YET) {
        PyThreadState *state = holds_gil ? PyEval_SaveThread() : NULL;
        found = look(slots, group->looks);
        int64_t left = group->yields < most_yields ? group->yields : most_yields;
        int64_t until = found == DONE ? 0 : nanoseconds() + YIELD_NANOSECONDS; /* on a busy core one may take long */
        for (; found == NOT_YET && left > 0 && nanoseconds() < until; left--)
            sched_yield(), found = look(slots, group->looks ? FIRST_LOOKS : 0);
        if (holds_gil) PyEval_RestoreThread(state);
    }
    for (int64_t r = 0; found == DONE && r < group->size; r++) {
        _Atomic int64_t *mark = group->peers[r].marks[slots->exchanges & 1];
        if (atomic_load_explicit(mark + 1, memory_order_relaxed) != slots->sequence ||
            atomic_load_explicit(mark + 2, memory_order_relaxed) != slots->call.code)
            found = ELSEWHERE;
    }
    return found;
}

static size_t chunk_of(const Slots *slots) {
    int64_t left = slots->call.count - slots->done;
    return (size_t)(left < slots->call.chunk ? left : slots->call.chunk);
}

static int size_of(size_t nbytes, int size) {
    return size < SIZES - 1 && nbytes >= STREAM_BYTES << (size + 1) ? size_of(nbytes, size + 1) : size;
}

/* Cores that share a cache exchange data fastest through it, others past it, by factors of 2 to 5; and virtual cores
   move. So each rank measures how fast it reads slots of both kinds, and writes its own of the faster kind: bits are the
   same. */
static int should_stream(Slots *slots, size_t nbytes) {
    if (nbytes < STREAM_BYTES || slots->group->size == 1) return 0;
    float(*costs)[2] = slots->costs[size_of(nbytes, 0)];
    int is_trial = ++slots->copies % TRIAL_CALLS == 0;
    return (costs[1][WRITE] + costs[1][READ] < costs[0][WRITE] + costs[0][READ]) != is_trial;
}

static void note(Slots *slots, size_t nbytes, int streams, int use, int64_t began) {
    float *cost = &slots->costs[size_of(nbytes, 0)][streams][use], found = (float)(nanoseconds() - began) / (float)nbytes;
    if (*cost == 0 || found < *cost) *cost = found;
    else *cost += ((found < 2 * *cost ? found : 2 * *cost) - *cost) / 8; /* one that was interrupted counts little */
}

static void note_read(Slots *slots, size_t nbytes, int64_t began) {
    const Group *group = slots->group;
    int64_t streamed = 0, parity = slots->exchanges & 1;
    for (int64_t r = 0; r < group->size; r++)
        if (r != group->rank) streamed += atomic_load_explicit(group->peers[r].marks[parity] + 3, memory_order_relaxed);
    if (nbytes >= STREAM_BYTES && (streamed == 0 || streamed == group->size - 1))
        note(slots, nbytes, streamed > 0, READ, began);
}

/* Publish the next chunk of the operand. All ranks have read this rank's slot of the same parity: they have published
   the exchange in between. */
static void publish_chunk(Slots *slots) {
    const Group *group = slots->group;
    const size_t item = ITEM[slots->call.how.dtype];
    const int is_given = slots->call.collective != BROADCAST || slots->call.root == group->rank;
    const size_t nbytes = is_given ? chunk_of(slots) * item : 0;
    slots->streams = should_stream(slots, nbytes);
    char *slot = group->peers[group->rank].slots[(slots->exchanges + 1) & 1];
    int64_t began = nbytes < STREAM_BYTES ? 0 : nanoseconds();
    copy(slot, slots->source + (size_t)slots->done * item, nbytes, slots->streams);
    if (slots->streams) atomic_thread_fence(memory_order_seq_cst);
    if (nbytes >= STREAM_BYTES) note(slots, nbytes, slots->streams, WRITE, began);
    slots->is_second = 0;
    publish(slots);
}

/* Go on with a collective of which an exchange has been published. */
static int proceed(Slots *slots, int holds_gil) {
    const Group *group = slots->group;
    const Call *call = &slots->call;
    const Reduction how = call->how;
    const size_t item = ITEM[how.dtype], p = (size_t)group->size;
    const char *in[MOST_OPERANDS];
    for (;;) {
        int found = await(slots, holds_gil);
        if (found != DONE) return found;
        const int64_t parity = slots->exchanges & 1;
        const size_t n = chunk_of(slots), offset = (size_t)slots->done * item;
        char *out = slots->out + offset;
        for (size_t r = 0; r < p; r++) in[r] = group->peers[r].slots[parity];
        const int64_t began = n * item < STREAM_BYTES ? 0 : nanoseconds();
        if (call->collective == BROADCAST && call->root != group->rank) memcpy(out, in[call->root], n * item);
        for (size_t r = 0; r < p && call->collective == ALL_GATHER; r++) memcpy(out + r * n * item, in[r], n * item);
        if (call->collective == REDUCE_SCATTER) {
            for (size_t r = 0; r < p; r++) in[r] += n / p * (size_t)group->rank * item;
            reduce(&how, in, p, &out, 1, n / p, 0);
        }
        if (call->collective == ALL_GATHER || call->collective == REDUCE_SCATTER) note_read(slots, n * item, began);
        if (call->collective != ALL_REDUCE) return DONE;
        if (call->by_part && !slots->is_second) {
            size_t begin = n * (size_t)group->rank / p, end = n * ((size_t)group->rank + 1) / p;
            for (size_t r = 0; r < p; r++) in[r] += begin * item;
            char *result = group->peers[group->rank].slots[!parity] + begin * item;
            reduce(&how, in, p, &result, 1, end - begin, slots->streams);
            note_read(slots, n * item, began);
            slots->is_second = 1;
            publish(slots);
            continue;
        }
        if (call->by_part) {
            for (size_t r = 0; r < p; r++) {
                size_t begin = n * r / p * item, end = n * (r + 1) / p * item;
                memcpy(out + begin, in[r] + begin, end - begin);
            }
        } else {
            in[group->rank] = slots->source + offset; /* in this core's cache, as the slot is not */
            reduce(&how, in, p, &out, 1, n, 0);
            note_read(slots, n * item, began);
        }
        slots->done += (int64_t)n;
        if (slots->done >= call->count) return DONE;
        publish_chunk(slots);
    }
}

static int go_on(Slots *slots) {
    const int is_small = (size_t)slots->call.count * ITEM[slots->call.how.dtype] < RELEASE_BYTES;
    PyThreadState *state = is_small ? NULL : PyEval_SaveThread();
    int found = proceed(slots, is_small);
    if (state != NULL) PyEval_RestoreThread(state);
    return found;
}

/* dlpack.h: a tensor, and the functions with which torch describes one. */
typedef struct {
    char *data;
    int32_t device, device_id, ndim;
    uint8_t kind, bits, lanes[2];
    int64_t *shape, *strides, offset;
} Tensor;
typedef struct { uint32_t major, minor; void *older, *others[3]; int (*describe)(void *, Tensor *); } Exchange;
static const Exchange *dlpack;
static PyObject *types[2], *predicates[2]; /* of tensors; whether their values are not those in memory */

static PyObject *use_tensors(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    if (given != 5) return PyErr_Format(PyExc_TypeError, "expected DLPack's functions, two types, is_neg, is_conj");
    dlpack = PyCapsule_GetPointer(args[0], "dlpack_exchange_api");
    if (dlpack == NULL) return NULL;
    for (int i = 0; i < 2; i++) types[i] = Py_NewRef(args[1 + i]), predicates[i] = Py_NewRef(args[3 + i]);
    return PyBool_FromLong(dlpack->major == 1 && dlpack->describe != NULL);
}

/* Return a dtype and its number of elements if an object is a dense contiguous tensor on the CPU; else DECLINED. */
static int describe(PyObject *object, Tensor *tensor, int64_t *count) {
    static const uint8_t kinds[ALL_DTYPES] = {2, 2, 2, 4, 0, 0, 0, 0, 1, 6, 5, 5};
    PyObject *type = (PyObject *)Py_TYPE(object);
    if (type != types[0] && type != types[1]) return DECLINED;
    if (dlpack->describe(object, tensor) != 0) return PyErr_Clear(), DECLINED;
    int dtype = 0, is_dense = 1;
    while (dtype < ALL_DTYPES && (tensor->kind != kinds[dtype] || tensor->bits != 8 * ITEM[dtype])) dtype++;
    *count = 1;
    for (int i = tensor->ndim - 1; i >= 0; *count *= tensor->shape[i--])
        is_dense &= tensor->shape[i] == 1 || tensor->strides[i] == *count;
    tensor->data = *count ? tensor->data + tensor->offset : (char *)tensor; /* no element is touched */
    if (dtype == ALL_DTYPES || tensor->device != 1 || tensor->data == NULL || (*count && !is_dense)) return DECLINED;
    for (int i = 0; i < (dtype < C64 ? 1 : 2); i++) {
        PyObject *is_so = PyObject_CallFunctionObjArgs(predicates[i], object, NULL);
        Py_XDECREF(is_so);
        if (is_so != Py_False) return PyErr_Clear(), DECLINED;
    }
    return dtype;
}

/* Set how a collective's tensors are reduced; 0 if they cannot be. */
static int set_reduction(Call *call, int dtype, int64_t size, PyObject *option) {
    static const char *const names[] = {"sum", "mean", "product", "min", "max"};
    int op = 0;
    while (op <= MAX && !(PyUnicode_Check(option) && PyUnicode_CompareWithASCIIString(option, names[op]) == 0)) op++;
    const int is_mean = op == MEAN, is_complex = dtype >= C64;
    if (op > MAX || (is_mean && dtype > BF16 && !is_complex) || (is_complex && op > MEAN)) return 0;
    call->code += (op + 1LL) << 52;
    if (dtype == BOOL) op = op == SUM || op == MAX ? MAX : MIN; /* a sum is a logical or, a product a logical and */
    if (is_complex) call->count *= 2;
    call->how = (Reduction){dtype == BOOL ? U8 : is_complex ? dtype - C64 + F32 : dtype, op, is_mean ? size : 1};
    return 1;
}

/* Begin a collective of a tensor, an out (or None) and an option, and finish it if no rank is late. */
static int begin(Slots *slots, int64_t sequence, int number, PyObject *const *args, int64_t most, int64_t *row_bytes) {
    const int gathers = number == ALL_GATHER, scatters = number == REDUCE_SCATTER;
    const Group *group = slots->group;
    int64_t count = 0, out_count;
    Tensor in = {.data = (char *)args}, out;
    const int dtype = number == BARRIER ? U8 : describe(args[0], &in, &count);
    const int64_t nbytes = dtype < 0 ? 0 : count * (int64_t)ITEM[dtype];
    if (dtype < 0 || nbytes > most || (number != ALL_REDUCE && nbytes > group->slot_bytes)) return DECLINED;
    if (scatters && (in.ndim == 0 || in.shape[0] != group->size)) return DECLINED;
    out = in;
    if (args[1] != Py_None && args[1] != args[0] &&
        (describe(args[1], &out, &out_count) != dtype || out.ndim + scatters != in.ndim + gathers ||
         (gathers && out.shape[0] != group->size) ||
         memcmp(out.shape + gathers, in.shape + scatters, (size_t)(out.ndim - gathers) * sizeof *out.shape) != 0))
        return DECLINED;
    const int64_t in_signature = scatters ? count / group->size : count;
    Call call = {count, ((number * 16LL + dtype) << 55) + in_signature, 0, {dtype, SUM, 1}, number, 0, 0};
    if ((number == ALL_REDUCE || scatters) && !set_reduction(&call, dtype, group->size, args[2])) return DECLINED;
    if (number == BROADCAST) {
        call.root = Py_TYPE(args[2]) == &PyLong_Type ? (int)PyLong_AsLong(args[2]) : -1;
        if (call.root < 0 || call.root >= group->size) return PyErr_Clear(), DECLINED;
        call.code += (call.root + 1LL) << 40;
    }
    const int64_t chunk_bytes = group->slot_bytes < CHUNK_BYTES ? group->slot_bytes : CHUNK_BYTES;
    call.chunk = nbytes <= group->slot_bytes ? call.count : chunk_bytes / (int64_t)ITEM[call.how.dtype];
    call.by_part = number == ALL_REDUCE && group->size > 2 && nbytes >= BY_PART_BYTES;
    slots->call = call, slots->source = in.data, slots->out = out.data, slots->sequence = sequence, slots->done = 0;
    if (number == ALL_REDUCE && in.data != out.data && in.data < out.data + nbytes && out.data < in.data + nbytes)
        slots->source = memmove(out.data, in.data, (size_t)nbytes);
    *row_bytes = in_signature * (int64_t)ITEM[dtype];
    publish_chunk(slots);
    return go_on(slots);
}

/* A caller that gives "most" holds the lock and has counted the call; others must take it when the words say so. */
static PyObject *collective(PyObject *bound, PyObject *const *args, Py_ssize_t given) {
    Slots *slots = PyCapsule_GetPointer(PyTuple_GetItem(bound, 0), "slots");
    int64_t *words = (int64_t *)PyByteArray_AsString(PyTuple_GetItem(bound, 2)), nbytes = 0;
    const int64_t number = given == 4 || given == 5 ? PyLong_AsLong(args[0]) : -1;
    if (number < 0 || number > BARRIER) return PyErr_Format(PyExc_TypeError, "expected collective, tensor, out, option");
    const int counts = given == 4;
    int64_t most = counts ? -1 : PyLong_AsLongLong(args[4]);
    if (most < 0) most = words[LIMITS + number];
    const int is_held = words[LOCKED] || words[QUEUED] || words[ENDED] || (words[SEQUENCE] + 1) % CALLS_PER_POLL == 0;
    if (words[RUNNING] || (counts && is_held)) return PyLong_FromLong(HELD);
    words[RUNNING] = (int64_t)PyThread_get_thread_ident(), words[SEQUENCE] += counts;
    int found = begin(slots, words[SEQUENCE], (int)number, args + 1, most, &nbytes);
    words[SEQUENCE] -= counts && found == DECLINED, words[BYTES] += counts ? nbytes : 0;
    while (found == NOT_YET || found == ELSEWHERE) {
        PyObject *none = PyObject_CallNoArgs(PyTuple_GetItem(bound, 1));
        found = none == NULL ? DONE : go_on(slots);
        Py_XDECREF(none);
    }
    return words[RUNNING] = 0, PyErr_Occurred() ? NULL : PyLong_FromLong(found);
}

#define FAST(name, text) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, text}
static PyMethodDef collective_definition = FAST(collective, "Run a collective; return 0, or -3 or -4 with nothing done.");

static PyObject *caller(PyObject *module, PyObject *bound) {
    if (!PyTuple_Check(bound) || PyTuple_Size(bound) != 3 || !PyCapsule_IsValid(PyTuple_GetItem(bound, 0), "slots") ||
        !PyByteArray_Check(PyTuple_GetItem(bound, 2)) || PyByteArray_Size(PyTuple_GetItem(bound, 2)) != 8 * WORDS)
        return PyErr_Format(PyExc_TypeError, "expected (slots, wait, bytearray of %d words)", WORDS);
    return PyCFunction_NewEx(&collective_definition, bound, NULL);
}

static PyObject *exchange(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    if (given != 3) return PyErr_Format(PyExc_TypeError, "expected slots, sequence, code");
    Slots *slots = PyCapsule_GetPointer(args[0], "slots");
    int64_t sequence = PyLong_AsLongLong(args[1]), code = PyLong_AsLongLong(args[2]);
    if (slots == NULL || PyErr_Occurred()) return NULL;
    slots->sequence = sequence, slots->call.code = code;
    publish(slots);
    return PyLong_FromLong(await(slots, 1));
}

static PyObject *state(PyObject *module, PyObject *capsule) {
    Slots *slots = PyCapsule_GetPointer(capsule, "slots");
    return slots == NULL ? NULL : Py_BuildValue("LL", (long long)slots->exchanges, (long long)slots->call.code);
}

static PyObject *yield_at_most(PyObject *module, PyObject *count) {
    most_yields = PyLong_AsLongLong(count);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

/* Load a word that ranks share, or store it: data before a store is seen after the load, on every processor. */
static PyObject *word(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    if (given != 1 && given != 2) return PyErr_Format(PyExc_TypeError, "expected address, value");
    _Atomic int64_t *at = PyLong_AsVoidPtr(args[0]);
    const int64_t value = given == 2 ? PyLong_AsLongLong(args[1]) : 0;
    if (PyErr_Occurred()) return NULL;
    if (given == 2) atomic_store(at, value);
    return PyLong_FromLongLong(given == 2 ? value : atomic_load(at));
}

/* ---- Sums of arrays ---- */

/* One of several sums: its addresses are those of the sources, then those of the outs. */
typedef struct { int64_t dtype, count, sources, outs, addresses[]; } Sum;
enum { SUM_WORDS = sizeof(Sum) / 8, SPAN_BYTES = 1 << 18 /* which a thread takes at once */ };

/* Reduce the spans of all sums, of which "next" is the first that no thread has taken. */
static void take_spans(Reduction how, const int64_t *words, size_t length, int streams, _Atomic int64_t *next) {
    char *at[2 * MOST_OPERANDS];
    int64_t begin = 0, taken = atomic_fetch_add(next, 1); /* spans */
    for (size_t i = 0; i < length;) {
        const Sum *sum = (const Sum *)(words + i);
        const size_t p = (size_t)sum->sources, m = (size_t)sum->outs, item = ITEM[sum->dtype];
        const int64_t step = (int64_t)(SPAN_BYTES / item), end = begin + (sum->count + step - 1) / step;
        how.dtype = (int)sum->dtype;
        for (; taken < end; taken = atomic_fetch_add(next, 1)) {
            int64_t first = (taken - begin) * step, left = sum->count - first;
            for (size_t r = 0; r < p + m; r++) at[r] = (char *)(intptr_t)sum->addresses[r] + (size_t)first * item;
            reduce(&how, (const char *const *)at, p, at + p, m, (size_t)(left < step ? left : step), streams);
        }
        begin = end, i += SUM_WORDS + p + m;
    }
}

static PyObject *combine(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    if (given != 5) return PyErr_Format(PyExc_TypeError, "expected op, divisor, streams, sums, next");
    Reduction how = {0, (int)PyLong_AsLong(args[0]), PyLong_AsLongLong(args[1])};
    const int streams = PyObject_IsTrue(args[2]);
    char *packed;
    Py_ssize_t nbytes;
    if (PyErr_Occurred() || PyBytes_AsStringAndSize(args[3], &packed, &nbytes) < 0) return NULL;
    if (!PyByteArray_Check(args[4]) || PyByteArray_Size(args[4]) != 8)
        return PyErr_Format(PyExc_ValueError, "next is no bytearray of 8 bytes");
    const int64_t *words = (const int64_t *)packed;
    const size_t length = (size_t)nbytes / 8;
    for (size_t i = 0; i < length;) {
        const Sum *sum = (const Sum *)(words + i);
        if (length - i < SUM_WORDS || sum->sources < 1 || sum->sources > MOST_OPERANDS || sum->outs < 1 ||
            sum->outs > MOST_OPERANDS || length - i - SUM_WORDS < (size_t)(sum->sources + sum->outs))
            return PyErr_Format(PyExc_ValueError, "word %zu of %zu begins no sum of 1 to 1024 addresses", i, length);
        if (sum->dtype < 0 || sum->dtype >= (how.divisor > 1 ? I8 : DTYPES) || how.divisor < 1 || sum->count < 0)
            return PyErr_Format(PyExc_ValueError, "dtype %lld, divisor %lld, %lld elements", (long long)sum->dtype,
                                (long long)how.divisor, (long long)sum->count);
        i += SUM_WORDS + (size_t)(sum->sources + sum->outs);
    }
    _Atomic int64_t *next = (_Atomic int64_t *)PyByteArray_AsString(args[4]);
    PyThreadState *state = PyEval_SaveThread();
    take_spans(how, words, length, streams, next);
    PyEval_RestoreThread(state);
    Py_RETURN_NONE;
}

/* ---- Checksums ---- */

typedef uint64_t Pair __attribute__((vector_size(16)));
enum { PAIRS = 4, BLOCK_BYTES = PAIRS * sizeof(Pair) };

/* Sum words by lane, and those sums: the second ones change where words have changed places. */
static PyObject *checksum(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    if (given != 2) return PyErr_Format(PyExc_TypeError, "expected address, bytes");
    const char *at = PyLong_AsVoidPtr(args[0]);
    const size_t nbytes = PyLong_AsSize_t(args[1]), whole = nbytes / BLOCK_BYTES * BLOCK_BYTES;
    if (PyErr_Occurred()) return NULL;
    Pair words, sums[PAIRS] = {0}, of_sums[PAIRS] = {0};
    char last[BLOCK_BYTES] = {0};
    memcpy(last, at + whole, nbytes - whole);
    PyThreadState *state = nbytes < RELEASE_BYTES ? NULL : PyEval_SaveThread();
    for (size_t begin = 0; begin <= whole; begin += BLOCK_BYTES)
        for (size_t i = 0; i < PAIRS; i++) {
            memcpy(&words, (begin < whole ? at + begin : last) + i * sizeof words, sizeof words);
            sums[i] += words, of_sums[i] += sums[i];
        }
    if (state != NULL) PyEval_RestoreThread(state);
    uint64_t first = 0, second = 0;
    for (size_t lane = 0; lane < 2 * PAIRS; lane++)
        first += (2 * lane + 1) * sums[lane / 2][lane % 2], second += (2 * lane + 1) * of_sums[lane / 2][lane % 2];
    return Py_BuildValue("LL", (long long)first, (long long)second);
}

static PyMethodDef functions[] = {
    {"open_slots", open_slots, METH_O, "Return a handle of a packed group of ranks."},
    FAST(use_tensors, "Take the functions and types of tensors; return whether `collective` can use them."),
    {"caller", caller, METH_O, "Return a function for (slots, wait, words) that calls \"wait\" while ranks are late."},
    FAST(exchange, "Publish this rank's slot and wait a little for the others; return 0, -1 or -2."),
    {"state", state, METH_O, "Return the number of exchanges that this rank has published, and the code of its call."},
    {"yield_at_most", yield_at_most, METH_O, "Limit the yields of this thread in one wait."},
    FAST(word, "Load the word at an address, or store it; return its value."),
    FAST(checksum, "Return two numbers that change with the bytes at an address, and with their order."),
    FAST(combine, "Reduce arrays into one or more arrays each; threads that share \"next\" share the work."),
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_core", NULL, 0, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__core(void) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) folds = wide;
#endif
    return PyModule_Create(&definition);
}
