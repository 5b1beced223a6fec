/* gangline._core: collectives through the slots of a host, and sums of several arrays in one pass over memory.
 *
 * Optional: without it ranks send messages, which Python reduces. The slots are those of transports/shm/slots.py.
 * Names: n elements of p operands or ranks; "in" and "out" their addresses; "how" they are reduced; "most" bytes that a
 * tensor may have; "given" arguments of a function; "looks" at marks; a call that "counts" takes a number of its own.
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
#pragma GCC diagnostic ignored "-Wdeprecated-declarations" /* 3.11 has no function in place of PyErr_Fetch */

#if defined(__SSE2__)
#include <emmintrin.h>
#else
#define _mm_pause() (void)0
#endif

enum { DONE = 0, NOT_YET = -1, MISMATCHED = -2, DECLINED = -3, HELD = -4 };
/* Integers that an engine shares with its core: number of its last collective; bytes of all; the thread for which the
   core runs one, or 0; the thread that holds the lock, or 0; number of queued operations; 1 if all calls take the lock;
   number of the collective that was begun and not ended, or 0; most bytes of each collective. */
enum { SEQUENCE, BYTES, RUNNING, LOCKED, QUEUED, MUST_LOCK, BEGUN, LIMITS, SHARED = LIMITS + 9 };
enum { CALLS_PER_POLL = 256 /* the watchdog's */, FIRST_LOOKS = 50 /* before others may run; one takes some 20 ns */ };
enum { SUM, MEAN, PRODUCT, MIN, MAX };              /* call_signature.OPS */
enum { F32, F64, F16, BF16, I8, I16, I32, I64, U8, DTYPES, BOOL = DTYPES, C64, C128, ALL_DTYPES }; /* its DTYPES */
/* call_signature.COLLECTIVES */
enum { ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, GATHER, SCATTER, BARRIER };
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
        _Pragma("GCC ivdep") for (size_t i = 0; i < n; i++) {                                      \
            u = x[i];                                                                              \
            v = y[i];                                                                              \
            z[i] = (T)(EXPRESSION);                                                                \
        }                                                                                          \
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
        to += i;
        from += i;
        n -= i;
    }
#endif
    memcpy(to, from, n);
}

typedef struct { int dtype, op; int64_t divisor; /* of the result; 1: none */ } Reduction;

static void divide(void *values, size_t n, const Reduction *how) {
    if (how->divisor == 1) return;
    Double *doubles = values;
    Float *floats = values;
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
    if (p == 2 && m == 1 && !streams && !is_half) {
        fold(out[0], in[0], in[1], n, how->op);
        divide(out[0], n, how);
        return;
    }
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

/* The ranks whose tensor a collective reads, and those that get a result; whether these have a leading axis with a row
   for each rank; whether it has an operation and a root. The order is that of the collectives' numbers. */
enum { NO_RANK, ALL_RANKS, ROOT, OTHER_RANKS /* than the root */ };
static const struct { char reads, writes, in_rows, out_rows, has_op, has_root; } RULES[] = {
    [ALL_REDUCE] = {ALL_RANKS, ALL_RANKS, 0, 0, 1, 0}, [REDUCE] = {ALL_RANKS, ROOT, 0, 0, 1, 1},
    [BROADCAST] = {ROOT, OTHER_RANKS, 0, 0, 0, 1},     [ALL_GATHER] = {ALL_RANKS, ALL_RANKS, 0, 1, 0, 0},
    [REDUCE_SCATTER] = {ALL_RANKS, ALL_RANKS, 1, 0, 1, 0}, [ALL_TO_ALL] = {ALL_RANKS, ALL_RANKS, 1, 1, 0, 0},
    [GATHER] = {ALL_RANKS, ROOT, 0, 1, 0, 1},          [SCATTER] = {ROOT, ALL_RANKS, 1, 0, 0, 1},
    [BARRIER] = {NO_RANK, NO_RANK, 0, 0, 0, 0},
};

/* A collective of one rank, and how it is done. */
typedef struct {
    int64_t count, code; /* elements that a rank publishes; CallSignature.code */
    int64_t chunk;       /* elements of one exchange */
    Reduction how;
    int collective, root, reads, writes; /* whether this rank's tensor is read, and whether it gets a result */
    int by_part; /* 1: each rank reduces its part of a chunk and publishes it; 0: each reduces all */
    int is_over; /* 1: of one rank, which has no other one to exchange anything with */
    char *source, *out; /* the tensor and the result; NULL: none */
    char *memory[2];    /* of both, as they were given; NULL: none, or not used */
} Call;

typedef struct {
    int64_t exchanges; /* so far */
    Call call;         /* the rest: the call that runs, or the last one */
    PyObject *tensors[2]; /* those of a call that was begun and not ended */
    int64_t sequence, done; /* elements */
    int64_t arrived;        /* when all ranks had published the first chunk: nanoseconds; 0: not yet */
    int is_second;          /* the parts' results have been published, in place of the operands */
    int streams;            /* whether the slot was written past the cache */
    float costs[SIZES][2][2]; /* by size, by that, and by use: ns per byte; 0: not known */
    unsigned copies;
    int64_t *shared;         /* with their engine, as the next two: functions that wait once for late ranks, and that */
    PyObject *wait, *failed; /* end the engine after an error and return the error to raise */
    Group *group;
} Slots;

static void release_tensors(Slots *slots) {
    for (int i = 0; i < 2; i++) Py_CLEAR(slots->tensors[i]);
}

static void close_slots(PyObject *capsule) {
    Slots *slots = PyCapsule_GetPointer(capsule, "slots");
    release_tensors(slots);
    PyMem_Free(slots);
}

static PyObject *open_slots(PyObject *Py_UNUSED(module), PyObject *packed) {
    char *words;
    Py_ssize_t nbytes;
    if (PyBytes_AsStringAndSize(packed, &words, &nbytes) < 0) return NULL;
    int64_t size = 0;
    if (nbytes >= (Py_ssize_t)sizeof(Group)) memcpy(&size, words, sizeof size);
    if (size < 1 || size > MOST_OPERANDS || nbytes != (Py_ssize_t)(sizeof(Group) + (size_t)size * sizeof(Peer)))
        return PyErr_Format(PyExc_ValueError, "%zd bytes are not a group; expected one of 1 to %d ranks", nbytes,
                            MOST_OPERANDS);
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

/* Look whether all ranks have published, or wait a little for them, and compare their calls. */
static int await(const Slots *slots, int waits, int holds_gil) {
    const Group *group = slots->group;
    int status = look(slots, group->looks < FIRST_LOOKS ? group->looks : FIRST_LOOKS);
    if (status == NOT_YET && waits) {
        PyThreadState *state = holds_gil ? PyEval_SaveThread() : NULL;
        status = look(slots, group->looks);
        int64_t left = group->yields < most_yields ? group->yields : most_yields;
        int64_t until = status == DONE ? 0 : nanoseconds() + YIELD_NANOSECONDS; /* on a busy core one may take long */
        for (; status == NOT_YET && left > 0 && nanoseconds() < until; left--) {
            sched_yield();
            status = look(slots, group->looks ? FIRST_LOOKS : 0);
        }
        if (holds_gil) PyEval_RestoreThread(state);
    }
    for (int64_t r = 0; status == DONE && r < group->size; r++) {
        _Atomic int64_t *mark = group->peers[r].marks[slots->exchanges & 1];
        if (atomic_load_explicit(mark + 1, memory_order_relaxed) != slots->sequence ||
            atomic_load_explicit(mark + 2, memory_order_relaxed) != slots->call.code)
            status = MISMATCHED;
    }
    return status;
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
    float *cost = &slots->costs[size_of(nbytes, 0)][streams][use];
    const float measured = (float)(nanoseconds() - began) / (float)nbytes;
    if (*cost == 0 || measured < *cost) *cost = measured;
    else *cost += ((measured < 2 * *cost ? measured : 2 * *cost) - *cost) / 8; /* if interrupted, it counts little */
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
    const Call *call = &slots->call;
    const size_t item = ITEM[call->how.dtype], nbytes = call->reads ? chunk_of(slots) * item : 0;
    slots->streams = should_stream(slots, nbytes);
    char *slot = group->peers[group->rank].slots[(slots->exchanges + 1) & 1];
    int64_t began = nbytes < STREAM_BYTES ? 0 : nanoseconds();
    if (nbytes) copy(slot, call->source + (size_t)slots->done * item, nbytes, slots->streams);
    if (slots->streams) atomic_thread_fence(memory_order_seq_cst);
    if (nbytes >= STREAM_BYTES) note(slots, nbytes, slots->streams, WRITE, began);
    slots->is_second = 0;
    publish(slots);
}

/* Reduce this rank's part of a chunk, and publish it in place of the operand. */
static void publish_part(Slots *slots, const char **in) {
    const Group *group = slots->group;
    const int64_t parity = slots->exchanges & 1, began = nanoseconds();
    const size_t item = ITEM[slots->call.how.dtype], n = chunk_of(slots), p = (size_t)group->size;
    size_t begin = n * (size_t)group->rank / p, end = n * ((size_t)group->rank + 1) / p;
    for (size_t r = 0; r < p; r++) in[r] += begin * item;
    char *result = group->peers[group->rank].slots[!parity] + begin * item;
    reduce(&slots->call.how, in, p, &result, 1, end - begin, slots->streams);
    note_read(slots, n * item, began);
    slots->is_second = 1;
    publish(slots);
}

/* Write the parts that the ranks have reduced. */
static void join_parts(const Slots *slots, const char *const *in, char *out) {
    const size_t item = ITEM[slots->call.how.dtype], n = chunk_of(slots), p = (size_t)slots->group->size;
    for (size_t r = 0; r < p; r++) {
        size_t begin = n * r / p * item, end = n * (r + 1) / p * item;
        memcpy(out + begin, in[r] + begin, end - begin);
    }
}

/* Write the result of a chunk: the operands reduced, the root's, or all in the order of the ranks. */
static void write_result(Slots *slots, const char **in, char *out) {
    const Group *group = slots->group;
    const Call *call = &slots->call;
    const size_t item = ITEM[call->how.dtype], n = chunk_of(slots), p = (size_t)group->size;
    const size_t taken = RULES[call->collective].in_rows ? n / p : n; /* elements of each operand */
    const int64_t began = n * item < STREAM_BYTES ? 0 : nanoseconds();
    for (size_t r = 0; r < p && RULES[call->collective].in_rows; r++) in[r] += taken * (size_t)group->rank * item;
    if (call->collective == ALL_REDUCE) /* in this core's cache, as the slot is not */
        in[group->rank] = call->source + (size_t)slots->done * item;
    if (RULES[call->collective].has_op) reduce(&call->how, in, p, &out, 1, taken, 0);
    else if (RULES[call->collective].reads == ROOT) memcpy(out, in[call->root], taken * item);
    else
        for (size_t r = 0; r < p; r++) memcpy(out + r * taken * item, in[r], taken * item);
    if (RULES[call->collective].reads == ALL_RANKS) note_read(slots, n * item, began);
}

/* Go on with a collective of which an exchange has been published. */
static int proceed(Slots *slots, int waits, int holds_gil) {
    const Group *group = slots->group;
    const Call *call = &slots->call;
    const char *in[MOST_OPERANDS];
    for (;;) {
        int status = await(slots, waits, holds_gil);
        if (status != DONE) return status;
        if (!slots->arrived && (size_t)call->count * ITEM[call->how.dtype] >= RELEASE_BYTES)
            slots->arrived = nanoseconds();
        for (int64_t r = 0; r < group->size; r++) in[r] = group->peers[r].slots[slots->exchanges & 1];
        if (call->by_part && !slots->is_second) {
            publish_part(slots, in);
            continue;
        }
        char *out = call->out + (size_t)slots->done * ITEM[call->how.dtype];
        if (call->by_part) join_parts(slots, in, out);
        else if (call->writes && call->count) write_result(slots, in, out);
        slots->done += (int64_t)chunk_of(slots);
        if (slots->done >= call->count) return DONE;
        publish_chunk(slots);
    }
}

static int go_on(Slots *slots, int waits) {
    const int is_small = (size_t)slots->call.count * ITEM[slots->call.how.dtype] < RELEASE_BYTES;
    PyThreadState *state = is_small ? NULL : PyEval_SaveThread();
    int status = proceed(slots, waits, is_small);
    if (state != NULL) PyEval_RestoreThread(state);
    return status;
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

static PyObject *use_tensors(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t given) {
    if (given != 5) return PyErr_Format(PyExc_TypeError, "expected DLPack's functions, two types, is_neg, is_conj");
    dlpack = PyCapsule_GetPointer(args[0], "dlpack_exchange_api");
    if (dlpack == NULL) return NULL;
    for (int i = 0; i < 2; i++) {
        types[i] = Py_NewRef(args[1 + i]);
        predicates[i] = Py_NewRef(args[3 + i]);
    }
    return PyBool_FromLong(dlpack->major == 1 && dlpack->describe != NULL);
}

/* Return a dtype and its number of elements if an object is a dense contiguous tensor on the CPU; else DECLINED. */
static int describe(PyObject *object, Tensor *tensor, int64_t *count) {
    static const uint8_t kinds[ALL_DTYPES] = {2, 2, 2, 4, 0, 0, 0, 0, 1, 6, 5, 5};
    PyObject *type = (PyObject *)Py_TYPE(object);
    if (type != types[0] && type != types[1]) return DECLINED;
    if (dlpack->describe(object, tensor) != 0) {
        PyErr_Clear();
        return DECLINED;
    }
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
        if (is_so != Py_False) {
            PyErr_Clear();
            return DECLINED;
        }
    }
    return dtype;
}

/* Set how tensors are reduced; 0 if they cannot be. */
static int set_reduction(Call *call, int dtype, int64_t size, PyObject *name) {
    static const char *const names[] = {"sum", "mean", "product", "min", "max"};
    int op = 0;
    while (op <= MAX && !(PyUnicode_Check(name) && PyUnicode_CompareWithASCIIString(name, names[op]) == 0)) op++;
    const int is_mean = op == MEAN, is_complex = dtype >= C64;
    if (op > MAX || (is_mean && dtype > BF16 && !is_complex) || (is_complex && op > MEAN)) return 0;
    call->code += (op + 1LL) << 52;
    if (dtype == BOOL) op = op == SUM || op == MAX ? MAX : MIN; /* a sum is a logical or, a product a logical and */
    if (is_complex) call->count *= 2;
    call->how = (Reduction){dtype == BOOL ? U8 : is_complex ? dtype - C64 + F32 : dtype, op, is_mean ? size : 1};
    return 1;
}

static int is_one_of(int ranks, int is_root) {
    return ranks == ALL_RANKS || (ranks == ROOT && is_root) || (ranks == OTHER_RANKS && !is_root);
}

/* Set the root, and so whether this rank's tensor is read and written; 0 if it is not a rank. */
static int set_root(Call *call, const Group *group, PyObject *root) {
    if (RULES[call->collective].has_root) {
        const long rank = Py_TYPE(root) == &PyLong_Type ? PyLong_AsLong(root) : -1;
        if (rank < 0 || rank >= group->size) {
            PyErr_Clear();
            return 0;
        }
        call->root = (int)rank;
        call->code += (call->root + 1LL) << 40;
    }
    call->reads = is_one_of(RULES[call->collective].reads, call->root == group->rank);
    call->writes = is_one_of(RULES[call->collective].writes, call->root == group->rank);
    return 1;
}

/* Describe the tensor and the result of a call and check that they fit each other; return their dtype, or DECLINED. */
static int describe_both(Call *call, const Group *group, PyObject *tensor, PyObject *result) {
    const int in_rows = RULES[call->collective].in_rows, out_rows = RULES[call->collective].out_rows;
    const int has_tensor = call->reads || call->collective == BROADCAST;
    const int has_result = call->writes && result != Py_None && result != tensor;
    Tensor in = {.data = (char *)call}, out = {0}; /* no byte of a missing tensor is touched */
    int64_t out_count = 0;
    int dtype = U8; /* of a barrier */
    if (has_tensor) {
        dtype = describe(tensor, &in, &call->count);
        if (dtype < 0 || (in_rows && (in.ndim == 0 || in.shape[0] != group->size))) return DECLINED;
    }
    if (has_result) {
        int out_dtype = describe(result, &out, &out_count);
        if (out_dtype < 0 || (out_rows && (out.ndim == 0 || out.shape[0] != group->size))) return DECLINED;
        if (has_tensor && (out_dtype != dtype || out.ndim - out_rows != in.ndim - in_rows ||
                           memcmp(out.shape + out_rows, in.shape + in_rows,
                                  (size_t)(out.ndim - out_rows) * sizeof *out.shape) != 0))
            return DECLINED;
        dtype = out_dtype;
        if (!has_tensor) call->count = out_count * group->size; /* a scatter's, of the root */
    } else if (call->writes && (in_rows || out_rows)) return DECLINED;
    call->source = in.data;
    call->out = has_result ? out.data : in.data;
    call->memory[0] = has_tensor && call->count ? in.data : NULL;
    call->memory[1] = has_result && out_count ? out.data : NULL;
    return dtype;
}

/* Describe a collective of a tensor, a result (or None) and an option; return its signature's bytes, or DECLINED.
   The option is the operation, the root, or (root, operation). */
static int64_t describe_call(Call *call, const Group *group, PyObject *const *args, int64_t most) {
    const int collective = call->collective;
    PyObject *root = args[2], *op = args[2];
    if (RULES[collective].has_op && RULES[collective].has_root) {
        if (!PyTuple_Check(args[2]) || PyTuple_Size(args[2]) != 2) return DECLINED;
        root = PyTuple_GetItem(args[2], 0);
        op = PyTuple_GetItem(args[2], 1);
    }
    if (!set_root(call, group, root)) return DECLINED;
    const int dtype = describe_both(call, group, args[0], args[1]);
    if (dtype < 0) return DECLINED;
    const int64_t nbytes = call->count * (int64_t)ITEM[dtype];
    if ((nbytes > most || (collective != ALL_REDUCE && nbytes > group->slot_bytes)) &&
        (group->size > 1 || call->source != call->out)) /* one rank keeps its tensor as it is */
        return DECLINED;
    const int64_t count = RULES[collective].in_rows ? call->count / group->size : call->count;
    call->how = (Reduction){dtype, SUM, 1};
    call->code += ((collective * 16LL + dtype) << 55) + count;
    if (RULES[collective].has_op && !set_reduction(call, dtype, group->size, op)) return DECLINED;
    const int64_t chunk_bytes = group->slot_bytes < CHUNK_BYTES ? group->slot_bytes : CHUNK_BYTES;
    call->chunk = nbytes <= group->slot_bytes ? call->count : chunk_bytes / (int64_t)ITEM[call->how.dtype];
    call->by_part = collective == ALL_REDUCE && group->size > 2 && nbytes >= BY_PART_BYTES;
    return count * (int64_t)ITEM[dtype];
}

/* ---- Collectives of an engine: "bound" is (slots, wait, failed, shared), of which the slots refer to the others ---- */

static Slots *slots_of(PyObject *bound) { return PyCapsule_GetPointer(PyTuple_GetItem(bound, 0), "slots"); }

/* Return whether a tensor of a call that was begun has been freed, or has other memory. */
static int has_moved(const Slots *slots) {
    Tensor tensor;
    int64_t count;
    for (int i = 0; i < 2; i++)
        if (slots->tensors[i] != NULL && slots->call.memory[i] != NULL &&
            (describe(slots->tensors[i], &tensor, &count) < 0 || tensor.data != slots->call.memory[i]))
            return 1;
    return 0;
}

/* Go on until the collective is over; without "waits", only if no rank is late. An error leaves it unfinished. */
static int finish(Slots *slots, int waits) {
    for (;;) {
        if (has_moved(slots)) {
            if (waits)
                PyErr_SetString(PyExc_ValueError, "the memory of its tensor was freed or replaced while a collective "
                                                  "ran; expected that after wait()");
            return MISMATCHED;
        }
        int status = slots->call.is_over ? DONE : go_on(slots, waits);
        if (status == DONE && slots->shared[BEGUN]) {
            release_tensors(slots);
            slots->shared[BEGUN] = 0;
        }
        if (status == DONE || !waits) return status;
        PyObject *none = PyObject_CallNoArgs(slots->wait);
        if (none == NULL) return status;
        Py_DECREF(none);
    }
}

/* Return whether a call must take the lock: another thread holds it or runs a call, calls are queued, or it is time to
   read announcements. A thread that has counted its call holds the lock. */
static int is_held(const int64_t *shared, int counts) {
    return shared[RUNNING] ||
           (counts && (shared[LOCKED] || shared[QUEUED] || shared[MUST_LOCK] ||
                       (shared[SEQUENCE] + 1) % CALLS_PER_POLL == 0));
}

/* Publish a collective of tensor, result and option; return its number, or DECLINED with nothing done. */
static int64_t publish_call(Slots *slots, int collective, PyObject *const *args, int64_t most, int counts,
                            int by_parts) {
    int64_t *shared = slots->shared;
    Call call = {.collective = collective};
    const int64_t nbytes = describe_call(&call, slots->group, args, most < 0 ? shared[LIMITS + collective] : most);
    if (nbytes < 0 || (call.by_part && !by_parts)) return DECLINED;
    shared[SEQUENCE] += counts;
    shared[BYTES] += counts ? nbytes : 0;
    const int64_t all = call.count * (int64_t)ITEM[call.how.dtype]; /* bytes */
    if (collective == ALL_REDUCE && call.source != call.out && call.source < call.out + all &&
        call.out < call.source + all) /* a chunk of the result may overlap operands of later ones */
        call.source = memmove(call.out, call.source, (size_t)all);
    call.is_over = slots->group->size == 1 && (call.source == call.out || all < (int64_t)RELEASE_BYTES);
    slots->call = call;
    slots->sequence = shared[SEQUENCE];
    slots->done = slots->arrived = 0;
    if (!call.is_over) publish_chunk(slots);
    else if (call.source != call.out) memmove(call.out, call.source, (size_t)all);
    return slots->sequence;
}

/* Raise the error with which the engine ends after the present one. */
static PyObject *raise_failure(const Slots *slots) {
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    if (traceback != NULL) PyException_SetTraceback(error, traceback);
    PyObject *reason = PyObject_CallFunctionObjArgs(slots->failed, error, NULL);
    if (reason != NULL) PyErr_SetObject((PyObject *)Py_TYPE(reason), reason);
    Py_XDECREF(reason);
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(traceback);
    return NULL;
}

/* Publish a collective, and end it if "waits"; else leave it begun, unless the one before is not over. A caller that
   gives the most bytes of a tensor holds the lock and has counted the call. */
static PyObject *start(PyObject *bound, PyObject *const *args, Py_ssize_t given, int waits) {
    Slots *slots = slots_of(bound);
    int64_t *shared = slots->shared;
    const long collective = given == 4 || given == 5 ? PyLong_AsLong(args[0]) : -1;
    if (collective < 0 || collective > BARRIER)
        return PyErr_Format(PyExc_TypeError, "expected collective, tensor, result, option");
    const int counts = given != 5;
    const int64_t most = counts ? -1 : PyLong_AsLongLong(args[4]);
    if (!counts && PyErr_Occurred()) return NULL;
    if (is_held(shared, counts)) return PyLong_FromLong(HELD);
    shared[RUNNING] = (int64_t)PyThread_get_thread_ident();
    int64_t status = shared[BEGUN] ? finish(slots, waits) : DONE;
    if (status == DONE) status = publish_call(slots, (int)collective, args + 1, most, counts, waits);
    else if (!waits) status = HELD;
    if (status > 0 && waits) status = finish(slots, 1);
    else if (status > 0) {
        shared[BEGUN] = status;
        for (int i = 0; i < 2; i++) slots->tensors[i] = Py_NewRef(args[1 + i]);
    }
    shared[RUNNING] = 0;
    return PyErr_Occurred() ? raise_failure(slots) : PyLong_FromLongLong(status);
}

static PyObject *run(PyObject *bound, PyObject *const *args, Py_ssize_t given) { return start(bound, args, given, 1); }

static PyObject *begin(PyObject *bound, PyObject *const *args, Py_ssize_t given) { return start(bound, args, given, 0); }

static PyObject *end(PyObject *bound, PyObject *const *args, Py_ssize_t given) {
    if (given != 2) return PyErr_Format(PyExc_TypeError, "expected number, waits");
    Slots *slots = slots_of(bound);
    int64_t *shared = slots->shared;
    const int64_t number = PyLong_AsLongLong(args[0]);
    if (PyErr_Occurred()) return NULL;
    if (shared[BEGUN] != number) return PyLong_FromLong(DONE);
    if (shared[RUNNING]) return PyLong_FromLong(HELD);
    shared[RUNNING] = (int64_t)PyThread_get_thread_ident();
    int status = finish(slots, PyObject_IsTrue(args[1]));
    shared[RUNNING] = 0;
    return PyErr_Occurred() ? raise_failure(slots) : PyLong_FromLong(status);
}

#define FAST(name, text) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, text}
static PyMethodDef calls[] = {
    FAST(run, "Run a collective; return 0, or -3 or -4 with nothing done."),
    FAST(begin, "Publish a collective; return its number, or -3 or -4 with nothing done."),
    FAST(end, "End the collective of a number, or try to; return 0, or -1, -2 or -4 if it is not over."),
};

static PyObject *caller(PyObject *Py_UNUSED(module), PyObject *bound) {
    Slots *slots = NULL;
    PyObject *shared = PyTuple_Check(bound) && PyTuple_Size(bound) == 4 ? PyTuple_GetItem(bound, 3) : NULL;
    if (shared != NULL && PyByteArray_Check(shared) && PyByteArray_Size(shared) == 8 * SHARED) slots = slots_of(bound);
    if (slots == NULL || slots->shared != NULL)
        return PyErr_Format(PyExc_TypeError, "expected (new slots, wait, failed, bytearray of %d integers)", SHARED);
    slots->shared = (int64_t *)PyByteArray_AsString(shared);
    slots->wait = PyTuple_GetItem(bound, 1);
    slots->failed = PyTuple_GetItem(bound, 2);
    return Py_BuildValue("NNN", PyCFunction_NewEx(&calls[0], bound, NULL), PyCFunction_NewEx(&calls[1], bound, NULL),
                         PyCFunction_NewEx(&calls[2], bound, NULL));
}

static PyObject *exchange(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t given) {
    if (given != 3) return PyErr_Format(PyExc_TypeError, "expected slots, sequence, code");
    Slots *slots = PyCapsule_GetPointer(args[0], "slots");
    int64_t sequence = PyLong_AsLongLong(args[1]), code = PyLong_AsLongLong(args[2]);
    if (slots == NULL || PyErr_Occurred()) return NULL;
    slots->sequence = sequence;
    slots->call.code = code;
    publish(slots);
    return PyLong_FromLong(await(slots, 1, 1));
}

static PyObject *state(PyObject *Py_UNUSED(module), PyObject *capsule) {
    Slots *slots = PyCapsule_GetPointer(capsule, "slots");
    if (slots == NULL) return NULL;
    return Py_BuildValue("LLLL", (long long)slots->exchanges, (long long)slots->sequence, (long long)slots->call.code,
                         (long long)slots->arrived);
}

static PyObject *yield_at_most(PyObject *Py_UNUSED(module), PyObject *count) {
    most_yields = PyLong_AsLongLong(count);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

/* Load a word that ranks share, or store it: data before a store is seen after the load, on every processor. */
static PyObject *word(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t given) {
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
        begin = end;
        i += SUM_WORDS + p + m;
    }
}

static PyObject *combine(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t given) {
    if (given != 5) return PyErr_Format(PyExc_TypeError, "expected op, divisor, streams, sums, next");
    Reduction how = {0, (int)PyLong_AsLong(args[0]), PyLong_AsLongLong(args[1])};
    const int streams = PyObject_IsTrue(args[2]);
    char *packed;
    Py_ssize_t nbytes;
    if (PyErr_Occurred() || PyBytes_AsStringAndSize(args[3], &packed, &nbytes) < 0) return NULL;
    if (!PyByteArray_Check(args[4]) || PyByteArray_Size(args[4]) != 8)
        return PyErr_Format(PyExc_ValueError, "next is not a counter; expected a bytearray of 8 bytes");
    const int64_t *words = (const int64_t *)packed;
    const size_t length = (size_t)nbytes / 8;
    for (size_t i = 0; i < length;) {
        const Sum *sum = (const Sum *)(words + i);
        if (length - i < SUM_WORDS || sum->sources < 1 || sum->sources > MOST_OPERANDS || sum->outs < 1 ||
            sum->outs > MOST_OPERANDS || length - i - SUM_WORDS < (size_t)(sum->sources + sum->outs))
            return PyErr_Format(PyExc_ValueError, "word %zu of %zu is not the first of a sum; expected 1 to %d addresses",
                                i, length, MOST_OPERANDS);
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
static PyObject *checksum(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t given) {
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
            sums[i] += words;
            of_sums[i] += sums[i];
        }
    if (state != NULL) PyEval_RestoreThread(state);
    uint64_t first = 0, second = 0;
    for (size_t lane = 0; lane < 2 * PAIRS; lane++) {
        first += (2 * lane + 1) * sums[lane / 2][lane % 2];
        second += (2 * lane + 1) * of_sums[lane / 2][lane % 2];
    }
    return Py_BuildValue("LL", (long long)first, (long long)second);
}

static PyMethodDef functions[] = {
    {"open_slots", open_slots, METH_O, "Return a handle of a packed group of ranks."},
    FAST(use_tensors, "Take the functions and types of tensors; return whether `collective` can use them."),
    {"caller", caller, METH_O, "Return the functions run, begin and end of an engine: (slots, wait, failed, shared)."},
    FAST(exchange, "Publish this rank's slot and wait a little for the others; return 0, -1 or -2."),
    {"state", state, METH_O, "Return exchanges; number and code of the last call; when all ranks had begun it."},
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
    static const struct { const char *name; long value; } constants[] = {
        {"SEQUENCE", SEQUENCE}, {"BYTES", BYTES}, {"RUNNING", RUNNING}, {"LOCKED", LOCKED}, {"QUEUED", QUEUED},
        {"MUST_LOCK", MUST_LOCK}, {"BEGUN", BEGUN}, {"LIMITS", LIMITS}, {"SHARED", SHARED},
        {"CALLS_PER_POLL", CALLS_PER_POLL},
    };
    PyObject *module = PyModule_Create(&definition);
    for (size_t i = 0; module != NULL && i < sizeof constants / sizeof *constants; i++)
        if (PyModule_AddIntConstant(module, constants[i].name, constants[i].value) < 0) Py_CLEAR(module);
    return module;
}
