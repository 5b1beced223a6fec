/* gangline._core: exchanges through the slots of a host, and sums of several arrays in one pass over memory.
 *
 * Optional. Without it Python does the same, with the same bits. The slots and their marks are those of
 * collectives/transports/shm/slots.py. No exchange and no sum allocates memory or waits for long: after some yields of the
 * processor, an exchange returns NOT_YET, Python waits with its deadlines, and `resume` goes on.
 */
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

#if defined(__SSE2__)
#include <emmintrin.h>
#define PAUSE() _mm_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ volatile("yield")
#else
#define PAUSE() (void)0
#endif

enum { DONE, NOT_YET, ELSEWHERE };
enum { SUM, MEAN, PRODUCT, MIN, MAX };              /* call_signature.OPS */
enum { F32, F64, F16, BF16, I8, I16, I32, I64, U8, DTYPES }; /* the first of call_signature.DTYPES */
enum { BLOCK = 1024 };                              /* elements that are reduced at a time, within the first cache */
enum { STREAMED_BLOCK = 64 };                       /* the same past the cache, so that reads and writes take turns */
enum { MOST_OPERANDS = 1024 };
enum { FIRST_LOOKS = 50 }; /* before other threads may run; a look takes some 20 ns */
static const size_t ITEM[DTYPES] = {4, 8, 2, 2, 1, 2, 4, 8, 1};
static const size_t STREAM_BYTES = 1 << 14;  /* from which a copy into a slot may bypass the cache */
enum { WRITE, READ };                        /* uses of a slot whose time is measured */
enum { SIZES = 6 };                          /* kinds of such copies, by the logarithm of their bytes */
enum { TRIAL_CALLS = 32 };                   /* copies after which the slower kind is tried again */
static const size_t RELEASE_BYTES = 1 << 15; /* from which other threads of the process may run */
enum { SPAN_BYTES = 1 << 18 };               /* of a sum, which a thread takes at once */

/* ---- Arithmetic ---- */

#define LOOP(T, EXPRESSION)                                        \
    {                                                              \
        const T *x = a, *y = b;                                    \
        T *z = out;                                                \
        _Pragma("GCC ivdep") for (size_t i = 0; i < n; i++) {      \
            T u = x[i], v = y[i];                                  \
            z[i] = (T)(EXPRESSION);                                \
        }                                                          \
        break;                                                     \
    }
/* out may be a or b. NaN wins, as in numpy and torch. */
#define FOLD(T, NAME, TARGET)                                                                     \
    TARGET static void NAME##_##T(void *out, const void *a, const void *b, size_t n, int op) {    \
        switch (op) {                                                                             \
        case PRODUCT: LOOP(T, u *v)                                                               \
        case MIN: LOOP(T, u < v || u != u ? u : v)                                                \
        case MAX: LOOP(T, u > v || u != u ? u : v)                                                \
        default: LOOP(T, u + v)                                                                   \
        }                                                                                         \
    }
#define FOLDS(NAME, TARGET)                                                                       \
    FOLD(float, NAME, TARGET) FOLD(double, NAME, TARGET) FOLD(int8_t, NAME, TARGET)               \
    FOLD(int16_t, NAME, TARGET) FOLD(int32_t, NAME, TARGET) FOLD(int64_t, NAME, TARGET)           \
    FOLD(uint8_t, NAME, TARGET)                                                                   \
    static Fold *const NAME[DTYPES] = {                                                           \
        NAME##_float, NAME##_double, NAME##_float, NAME##_float, NAME##_int8_t,                   \
        NAME##_int16_t, NAME##_int32_t, NAME##_int64_t, NAME##_uint8_t};
typedef void Fold(void *, const void *, const void *, size_t, int);
FOLDS(portable, )
#if defined(__x86_64__)
FOLDS(wide, __attribute__((target("arch=haswell"))))
#endif
static Fold *const *folds = portable; /* by dtype; those of this processor after PyInit__core */

static inline float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static void widen(float *out, const uint16_t *in, size_t n, int dtype) {
    if (dtype == BF16) {
        for (size_t i = 0; i < n; i++) out[i] = float_of((uint32_t)in[i] << 16);
        return;
    }
    for (size_t i = 0; i < n; i++) {
        uint32_t half = in[i], exponent = half >> 10 & 31, fraction = half & 1023;
        uint32_t normal = (exponent == 31 ? 0x7F800000 : (exponent + 112) << 23) | fraction << 13;
        uint32_t subnormal = bits_of((float)(int32_t)fraction * 0x1p-24f);
        out[i] = float_of((exponent ? normal : subnormal) | (half & 0x8000) << 16);
    }
}

static void narrow(uint16_t *out, const float *in, size_t n, int dtype) { /* to nearest, ties to even */
    if (dtype == BF16) {
        for (size_t i = 0; i < n; i++) {
            uint32_t bits = bits_of(in[i]);
            out[i] = in[i] != in[i] ? 0x7FC0 : (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
        }
        return;
    }
    for (size_t i = 0; i < n; i++) {
        uint32_t bits = bits_of(in[i]), size = bits & 0x7FFFFFFF;
        uint32_t large = size > 0x7F800000 ? 0x7E00 : 0x7C00;             /* NaN, and 65,536 or more */
        uint32_t subnormal = bits_of(float_of(size) + 0.5f) - 0x3F000000; /* 0.5 has the unit 2**-24 */
        uint32_t normal = (size - 0x38000000 + 0xFFF + (size >> 13 & 1)) >> 13;
        uint32_t half = size >= 0x47800000 ? large : size < 0x38800000 ? subnormal : normal;
        out[i] = (uint16_t)(half | (bits >> 16 & 0x8000));
    }
}

/* Copy memory that does not overlap, past the cache if "streams" (then `fence` comes before others may read it). */
static void copy(char *to, const char *from, size_t n, int streams) {
#if defined(__SSE2__)
    if (streams) {
        size_t head = (size_t)(-(uintptr_t)to & 15);
        if (head > n) head = n;
        memcpy(to, from, head);
        size_t i = head;
        for (; i + 64 <= n; i += 64) {
            const __m128i *in = (const __m128i *)(from + i);
            __m128i *out = (__m128i *)(to + i);
            __m128i a = _mm_loadu_si128(in), b = _mm_loadu_si128(in + 1);
            __m128i c = _mm_loadu_si128(in + 2), d = _mm_loadu_si128(in + 3);
            _mm_stream_si128(out, a);
            _mm_stream_si128(out + 1, b);
            _mm_stream_si128(out + 2, c);
            _mm_stream_si128(out + 3, d);
        }
        to += i, from += i, n -= i;
    }
#endif
    (void)streams;
    memcpy(to, from, n);
}

static void fence(void) {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

typedef struct {
    int dtype, op;
    int64_t divisor; /* of the result; 1: none */
} Reduction;

static int is_valid(int64_t dtype, int64_t divisor) { /* integers are not divided */
    return dtype >= 0 && dtype < DTYPES && (divisor == 1 || (divisor > 1 && dtype <= BF16));
}

static void divide(void *values, size_t n, const Reduction *how) {
    if (how->divisor == 1) return;
    if (how->dtype == F64) {
        double *v = values;
        for (size_t i = 0; i < n; i++) v[i] /= (double)how->divisor;
    } else {
        float *v = values;
        for (size_t i = 0; i < n; i++) v[i] /= (float)how->divisor;
    }
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
            widen((float *)sums, (const uint16_t *)(in[0] + offset), count, how->dtype);
            for (size_t r = 1; r < p; r++) {
                widen((float *)operand, (const uint16_t *)(in[r] + offset), count, how->dtype);
                fold(sums, sums, operand, count, how->op);
            }
            divide(sums, count, how);
            narrow((uint16_t *)operand, (const float *)sums, count, how->dtype);
            result = operand;
        } else {
            if (p == 1) memcpy(sums, in[0] + offset, count * item);
            else fold(sums, in[0] + offset, in[1] + offset, count, how->op);
            for (size_t r = 2; r < p; r++) fold(sums, sums, in[r] + offset, count, how->op);
            divide(sums, count, how);
        }
        for (size_t j = 0; j < m; j++) copy(out[j] + offset, result, count * item, past[j]);
    }
    if (streams) fence();
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

/* A prepared all-reduce, packed by Python. */
typedef struct {
    int64_t count, dtype, op, divisor, code;
    int64_t chunk;   /* elements of one exchange */
    int64_t by_part; /* 1: each rank reduces its part of a chunk and publishes it; 0: each reduces all */
} Prepared;

typedef struct {
    int64_t exchanges; /* so far */
    Prepared prepared; /* the rest: the call that runs, or the last one */
    const char *source;
    char *out;
    int64_t sequence, done; /* elements */
    int is_second;          /* the parts' results have been published, in place of the operands */
    int streams;            /* whether the slot was written past the cache */
    float costs[SIZES][2][2]; /* by size, by that, and by use: ns per byte; 0: not known */
    unsigned copies;
    Group *group;
} Slots;

static void close_slots(PyObject *capsule) {
    Slots *slots = PyCapsule_GetPointer(capsule, "slots");
    if (slots != NULL) PyMem_Free(slots->group), PyMem_Free(slots);
}

static PyObject *open_slots(PyObject *module, PyObject *packed) {
    char *words;
    Py_ssize_t nbytes;
    (void)module;
    if (PyBytes_AsStringAndSize(packed, &words, &nbytes) < 0) return NULL;
    int64_t size = 0;
    if (nbytes >= (Py_ssize_t)sizeof(Group)) memcpy(&size, words, sizeof size);
    if (size < 1 || size > MOST_OPERANDS || nbytes != (Py_ssize_t)(sizeof(Group) + (size_t)size * sizeof(Peer)))
        return PyErr_Format(PyExc_ValueError, "%zd bytes describe no group of 1 to %d ranks", nbytes, MOST_OPERANDS);
    Slots *slots = PyMem_Calloc(1, sizeof *slots);
    if (slots == NULL || (slots->group = PyMem_Malloc((size_t)nbytes)) == NULL) {
        PyMem_Free(slots);
        return PyErr_NoMemory();
    }
    memcpy(slots->group, words, (size_t)nbytes);
    PyObject *capsule = PyCapsule_New(slots, "slots", close_slots);
    if (capsule == NULL) PyMem_Free(slots->group), PyMem_Free(slots);
    return capsule;
}

/* Publish this rank's slot, which holds what the others are to read. */
static void publish(Slots *slots) {
    const Group *group = slots->group;
    int64_t count = ++slots->exchanges;
    _Atomic int64_t *mark = group->peers[group->rank].marks[count & 1];
    atomic_store_explicit(mark + 1, slots->sequence, memory_order_relaxed);
    atomic_store_explicit(mark + 2, slots->prepared.code, memory_order_relaxed);
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
        while (atomic_load_explicit(mark, memory_order_acquire) != count) {
            if (--looks < 0) return NOT_YET;
            PAUSE();
        }
    }
    return DONE;
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
        for (; found == NOT_YET && left > 0; left--) {
            sched_yield();
            found = look(slots, group->looks ? FIRST_LOOKS : 0);
        }
        if (holds_gil) PyEval_RestoreThread(state);
    }
    for (int64_t r = 0; found == DONE && r < group->size; r++) {
        _Atomic int64_t *mark = group->peers[r].marks[slots->exchanges & 1];
        if (atomic_load_explicit(mark + 1, memory_order_relaxed) != slots->sequence ||
            atomic_load_explicit(mark + 2, memory_order_relaxed) != slots->prepared.code)
            found = ELSEWHERE;
    }
    return found;
}

static size_t chunk_of(const Slots *slots) {
    int64_t left = slots->prepared.count - slots->done;
    return (size_t)(left < slots->prepared.chunk ? left : slots->prepared.chunk);
}

/* Cores that share a cache exchange data fastest through it, others past it, by factors of 2 to 5; and virtual cores
   move. So each rank measures how fast it reads slots of both kinds, and writes its own of the faster kind: the bits are
   the same. */
static int64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static int size_of(size_t nbytes) {
    int size = 0;
    while (size < SIZES - 1 && nbytes >= STREAM_BYTES << (size + 1)) size++;
    return size;
}

static int should_stream(Slots *slots, size_t nbytes) {
    if (nbytes < STREAM_BYTES || slots->group->size == 1) return 0;
    float(*costs)[2] = slots->costs[size_of(nbytes)];
    int is_trial = ++slots->copies % TRIAL_CALLS == 0;
    return (costs[1][WRITE] + costs[1][READ] < costs[0][WRITE] + costs[0][READ]) != is_trial;
}

static void note(Slots *slots, size_t nbytes, int streams, int use, int64_t began) {
    float found = (float)(nanoseconds() - began) / (float)nbytes, *cost = &slots->costs[size_of(nbytes)][streams][use];
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
    const size_t item = ITEM[slots->prepared.dtype], nbytes = chunk_of(slots) * item;
    slots->streams = should_stream(slots, nbytes);
    char *slot = group->peers[group->rank].slots[(slots->exchanges + 1) & 1];
    int64_t began = nbytes < STREAM_BYTES ? 0 : nanoseconds();
    copy(slot, slots->source + (size_t)slots->done * item, nbytes, slots->streams);
    if (slots->streams) fence();
    if (nbytes >= STREAM_BYTES) note(slots, nbytes, slots->streams, WRITE, began);
    slots->is_second = 0;
    publish(slots);
}

/* Go on with an all-reduce of which an exchange has been published. */
static int proceed(Slots *slots, int holds_gil) {
    const Group *group = slots->group;
    const Prepared *prepared = &slots->prepared;
    const Reduction how = {(int)prepared->dtype, (int)prepared->op, prepared->divisor};
    const size_t item = ITEM[how.dtype], p = (size_t)group->size;
    const char *in[MOST_OPERANDS];
    for (;;) {
        int found = await(slots, holds_gil);
        if (found != DONE) return found;
        const int64_t parity = slots->exchanges & 1;
        const size_t n = chunk_of(slots), offset = (size_t)slots->done * item;
        char *out = slots->out + offset;
        for (size_t r = 0; r < p; r++) in[r] = group->peers[r].slots[parity];
        if (prepared->by_part && !slots->is_second) {
            size_t begin = n * (size_t)group->rank / p, end = n * ((size_t)group->rank + 1) / p;
            for (size_t r = 0; r < p; r++) in[r] += begin * item;
            char *result = group->peers[group->rank].slots[!parity] + begin * item;
            int64_t began = nanoseconds();
            reduce(&how, in, p, &result, 1, end - begin, slots->streams);
            note_read(slots, n * item, began);
            slots->is_second = 1;
            publish(slots);
            continue;
        }
        if (prepared->by_part) {
            for (size_t r = 0; r < p; r++) {
                size_t begin = n * r / p * item, end = n * (r + 1) / p * item;
                memcpy(out + begin, in[r] + begin, end - begin);
            }
        } else {
            in[group->rank] = slots->source + offset; /* in this core's cache, as the slot is not */
            int64_t began = n * item < STREAM_BYTES ? 0 : nanoseconds();
            reduce(&how, in, p, &out, 1, n, 0);
            note_read(slots, n * item, began);
        }
        slots->done += (int64_t)n;
        if (slots->done >= prepared->count) return DONE;
        publish_chunk(slots);
    }
}

static int go_on(Slots *slots) {
    if ((size_t)slots->prepared.count * ITEM[slots->prepared.dtype] < RELEASE_BYTES) return proceed(slots, 1);
    PyThreadState *state = PyEval_SaveThread();
    int found = proceed(slots, 0);
    PyEval_RestoreThread(state);
    return found;
}

static PyObject *all_reduce(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    (void)module;
    if (given != 5) return PyErr_Format(PyExc_TypeError, "expected slots, prepared, source, out, sequence");
    Slots *slots = PyCapsule_GetPointer(args[0], "slots");
    const char *packed = PyBytes_AsString(args[1]);
    if (slots == NULL || packed == NULL) return NULL;
    if (PyBytes_Size(args[1]) != sizeof(Prepared)) return PyErr_Format(PyExc_ValueError, "prepared has another size");
    const char *source = PyLong_AsVoidPtr(args[2]);
    char *out = PyLong_AsVoidPtr(args[3]);
    int64_t sequence = PyLong_AsLongLong(args[4]);
    if (PyErr_Occurred()) return NULL;
    Prepared *prepared = &slots->prepared;
    memcpy(prepared, packed, sizeof *prepared);
    if (!is_valid(prepared->dtype, prepared->divisor) || prepared->count < 0 || prepared->chunk < 1 ||
        prepared->chunk > slots->group->slot_bytes / (int64_t)ITEM[prepared->dtype])
        return PyErr_Format(PyExc_ValueError, "%lld elements of a chunk do not fit the slot", (long long)prepared->chunk);
    size_t nbytes = (size_t)prepared->count * ITEM[prepared->dtype];
    if (source != out && source < out + nbytes && out < source + nbytes) {
        memmove(out, source, nbytes);
        source = out;
    }
    slots->source = source, slots->out = out, slots->sequence = sequence, slots->done = 0;
    publish_chunk(slots);
    return PyLong_FromLong(go_on(slots));
}

static PyObject *resume(PyObject *module, PyObject *capsule) {
    (void)module;
    Slots *slots = PyCapsule_GetPointer(capsule, "slots");
    return slots == NULL ? NULL : PyLong_FromLong(go_on(slots));
}

static PyObject *exchange(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    (void)module;
    if (given != 3) return PyErr_Format(PyExc_TypeError, "expected slots, sequence, code");
    Slots *slots = PyCapsule_GetPointer(args[0], "slots");
    int64_t sequence = PyLong_AsLongLong(args[1]), code = PyLong_AsLongLong(args[2]);
    if (slots == NULL || PyErr_Occurred()) return NULL;
    slots->sequence = sequence, slots->prepared.code = code;
    publish(slots);
    return PyLong_FromLong(await(slots, 1));
}

static PyObject *exchanges(PyObject *module, PyObject *capsule) {
    (void)module;
    Slots *slots = PyCapsule_GetPointer(capsule, "slots");
    return slots == NULL ? NULL : PyLong_FromLongLong(slots->exchanges);
}

static PyObject *yield_at_most(PyObject *module, PyObject *count) {
    (void)module;
    long long most = PyLong_AsLongLong(count);
    if (PyErr_Occurred()) return NULL;
    most_yields = most;
    Py_RETURN_NONE;
}

/* ---- Sums of arrays ---- */

/* One of several sums: its addresses are those of the sources, then those of the outs. */
typedef struct {
    int64_t dtype, count, sources, outs, addresses[];
} Sum;
enum { SUM_WORDS = sizeof(Sum) / 8 };

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
    (void)module;
    if (given != 5) return PyErr_Format(PyExc_TypeError, "expected op, divisor, streams, sums, next");
    Reduction how = {0, (int)PyLong_AsLong(args[0]), PyLong_AsLongLong(args[1])};
    const int streams = PyObject_IsTrue(args[2]);
    char *packed;
    Py_ssize_t nbytes;
    if (PyErr_Occurred() || PyBytes_AsStringAndSize(args[3], &packed, &nbytes) < 0) return NULL;
    if (!PyByteArray_Check(args[4]) || PyByteArray_Size(args[4]) != 8) return PyErr_Format(PyExc_ValueError, "next is no bytearray of 8 bytes");
    const int64_t *words = (const int64_t *)packed;
    const size_t length = (size_t)nbytes / 8;
    size_t total = 0;
    for (size_t i = 0; i < length;) {
        const Sum *sum = (const Sum *)(words + i);
        if (length - i < SUM_WORDS || sum->sources < 1 || sum->sources > MOST_OPERANDS || sum->outs < 1 ||
            sum->outs > MOST_OPERANDS || length - i - SUM_WORDS < (size_t)(sum->sources + sum->outs))
            return PyErr_Format(PyExc_ValueError, "word %zu of %zu begins no sum of 1 to %d addresses", i, length, MOST_OPERANDS);
        if (!is_valid(sum->dtype, how.divisor) || sum->count < 0)
            return PyErr_Format(PyExc_ValueError, "dtype %lld, divisor %lld, %lld elements", (long long)sum->dtype,
                                (long long)how.divisor, (long long)sum->count);
        total += (size_t)sum->count * ITEM[sum->dtype];
        i += SUM_WORDS + (size_t)(sum->sources + sum->outs);
    }
    _Atomic int64_t *next = (_Atomic int64_t *)PyByteArray_AsString(args[4]);
    PyThreadState *state = total < RELEASE_BYTES ? NULL : PyEval_SaveThread();
    take_spans(how, words, length, streams, next);
    if (state != NULL) PyEval_RestoreThread(state);
    Py_RETURN_NONE;
}

#define FAST(name, text) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, text}
static PyMethodDef functions[] = {
    {"open_slots", open_slots, METH_O, "Return a handle of a packed group of ranks."},
    FAST(all_reduce, "Begin an all-reduce; return 0 (done), 1 (not yet) or 2 (a rank is in another call)."),
    {"resume", resume, METH_O, "Go on with an all-reduce that was not done yet; return the same numbers."},
    FAST(exchange, "Publish this rank's slot and wait a little for the others; return the same numbers."),
    {"exchanges", exchanges, METH_O, "Return the number of exchanges that this rank has published."},
    {"yield_at_most", yield_at_most, METH_O, "Limit the yields of this thread in one wait."},
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
