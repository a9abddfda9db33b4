"""The double's kernels, in CUDA C++ that is compiled at run time.

A batch is ``begin``, one ``step`` for each step, ``count``, ``tell`` and ``pack`` for a data-dependent
output, and ``finish``. Floating-point arithmetic is rounded after every operation (``--fmad=false``), so the
results equal NumPy's bit by bit. ``cuda`` repeats the layout of ``struct Batch`` and ``struct Pinned`` field
by field; their sizes are compared when this is compiled.
"""

from typing import Final

SOURCE: Final = r"""
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

enum { FLOAT32, FLOAT16, BFLOAT16, INT8, UINT8, INT32, INT64 };
enum { EXECUTING = 1, NOT_EXECUTED = 2, WRITTEN_TO = 3, MODIFIED = 4, GONE = 5 };
const u32 RECORDS = 256;
const u32 ANY = 0xffffffffu;

// Counters that only the device uses; they are only changed atomically.
struct Control {
    u32 hangs, faults, violations, pad;
    u32 busy[1024], done[1024];
    u32 started[2][2048], finished[2][2048], blocks[2048];
};

struct Record { u32 kind, number, cell, valid; };

// Memory shared with the host, which arms hangs and faults, and reads the rest.
struct Pinned {
    u32 hangs_armed, hangs_begun, hangs_released, faults_armed;
    u64 states[2048];
    u32 started[2][2048], finished[2][2048], longest[2048];
    Record records[RECORDS];
};

struct Input { const void* source; void* target; char* states; u64 count, stride; u64 kind; };

struct Batch {
    Control* control;
    volatile Pinned* pinned;
    u64* guards[2];
    const long long* weights;
    void* packed;
    u32* counts;
    u64 work_ns, rows, row_length, state;
    u32 number, slot, captured, inputs, steps, lanes, cells, pad;
    u32 cell[8], expected[8];
    Input input[4];
};

static_assert(sizeof(Batch) == BATCH_NBYTES, "Batch is laid out differently on the host");
static_assert(sizeof(Pinned) == PINNED_NBYTES, "Pinned is laid out differently on the host");
static_assert(sizeof(Control) == CONTROL_NBYTES, "Control is larger or smaller than what is allocated");

__device__ float half_to_float(u16 bits) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(bits));
    return f;
}

__device__ u16 float_to_half(float f) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(f));
    return bits;
}

__device__ u16 float_to_bfloat(float f) {
    if (f != f) return 0x7fff;
    u32 bits = __float_as_uint(f);
    return (u16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

__device__ bool is_floating(u64 kind) { return kind <= BFLOAT16; }

__device__ float load_float(const Input& in, u64 i) {
    if (in.kind == FLOAT32) return ((const float*)in.source)[i];
    u16 bits = ((const u16*)in.source)[i];
    return in.kind == FLOAT16 ? half_to_float(bits) : __uint_as_float((u32)bits << 16);
}

__device__ long long load_whole(const Input& in, u64 i) {
    switch (in.kind) {
        case INT8: return ((const signed char*)in.source)[i];
        case UINT8: return ((const unsigned char*)in.source)[i];
        case INT32: return ((const int*)in.source)[i];
        default: return ((const long long*)in.source)[i];
    }
}

__device__ void store_float(u64 kind, void* target, u64 i, float value) {
    if (kind == FLOAT32) ((float*)target)[i] = value;
    else ((u16*)target)[i] = kind == FLOAT16 ? float_to_half(value) : float_to_bfloat(value);
}

__device__ void store_whole(u64 kind, void* target, u64 i, long long value) {
    switch (kind) {
        case INT8: ((signed char*)target)[i] = (signed char)value; break;
        case UINT8: ((unsigned char*)target)[i] = (unsigned char)value; break;
        case INT32: ((int*)target)[i] = (int)value; break;
        default: ((long long*)target)[i] = value;
    }
}

__device__ u64 now_ns() { u64 t; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)); return t; }
__device__ u32 look(u32* counter) { return atomicAdd(counter, 0u); }

// Takes one of the failures that the host has armed, and returns its number; 0 if none is left.
__device__ u32 take(u32* taken, volatile const u32* armed) {
    for (;;) {
        u32 now = look(taken);
        if (now >= *armed) return 0;
        if (atomicCAS(taken, now, now + 1) == now) return now + 1;
    }
}

__device__ void report(const Batch& b, u32 kind, u32 cell) {
    u32 index = atomicAdd(&b.control->violations, 1u);
    if (index >= RECORDS) return;
    volatile Record* record = &b.pinned->records[index];
    record->kind = kind;
    record->number = b.number;
    record->cell = cell;
    __threadfence_system();
    record->valid = index + 1;
}

__device__ void enter(const Batch& b) {
    Control* control = b.control;
    b.pinned->started[b.captured][b.slot] = atomicAdd(&control->started[b.captured][b.slot], 1u) + 1;
    // The upper half is the context that has the slot, the lower half how often it has been modified.
    if (b.captured) {
        u64 state = b.pinned->states[b.slot];
        if (state != b.state) report(b, state >> 32 == b.state >> 32 ? MODIFIED : GONE, b.cell[0]);
    }
    for (u32 i = 0; i < b.cells; i++) {
        // An earlier batch has not executed. If it is executing right now, that is reported below.
        if (b.expected[i] != ANY && (int)(look(&control->done[b.cell[i]]) - b.expected[i]) < 0
            && !look(&control->busy[b.cell[i]])) report(b, NOT_EXECUTED, b.cell[i]);
    }
    // First mark the arena, then look for other marks: of two batches that meet, at least one sees the other.
    u32 before = atomicAdd(&control->busy[b.cell[0]], 1u);
    __threadfence();
    if (before) report(b, EXECUTING, b.cell[0]);
    for (u32 i = 1; i < b.cells; i++)
        if (look(&control->busy[b.cell[i]])) report(b, EXECUTING, b.cell[i]);
    if (take(&control->faults, &b.pinned->faults_armed)) *(volatile int*)8 = 1;
    if (u32 hang = take(&control->hangs, &b.pinned->hangs_armed)) {
        b.pinned->hangs_begun = hang;
        while (b.pinned->hangs_released < hang) __nanosleep(1000);
    }
    *(volatile u64*)b.guards[0] = b.number;
    *(volatile u64*)b.guards[1] = b.number;
    if (b.packed) b.counts[b.rows] = 0;
}

__device__ void leave(const Batch& b) {
    Control* control = b.control;
    if (*(volatile u64*)b.guards[0] != b.number || *(volatile u64*)b.guards[1] != b.number)
        report(b, WRITTEN_TO, b.cell[0]);
    *(volatile u64*)b.guards[0] = 0;
    *(volatile u64*)b.guards[1] = 0;
    if (b.packed) b.counts[b.rows] = 0x7fffffffu;
    __threadfence();
    atomicSub(&control->busy[b.cell[0]], 1u);
    if (b.expected[0] != ANY) atomicAdd(&control->done[b.cell[0]], 1u);
    __threadfence_system();
    b.pinned->finished[b.captured][b.slot] = atomicAdd(&control->finished[b.captured][b.slot], 1u) + 1;
}

extern "C" __global__ void __launch_bounds__(1024, 2) begin(const Batch b) {
    if (blockIdx.x == 0 && threadIdx.x == 0) enter(b);
    if (!b.work_ns) return;
    // No thread of this block starts to work before a hang has been released.
    __syncthreads();
    u64 start = now_ns();
    while (now_ns() - start < b.work_ns) {}
}

extern "C" __global__ void step(const Batch b, u32 number, u32 lane) {
    u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x, threads = (u64)gridDim.x * blockDim.x;
    long long a = b.weights[2 * (number - 1)], c = b.weights[2 * (number - 1) + 1];
    for (u32 n = 0; n < b.inputs; n++) {
        const Input& in = b.input[n];
        u64 end = in.count * (lane + 1) / b.lanes;
        char* to = in.states + (number - 1) * in.stride;
        const char* from = to - in.stride;
        for (u64 i = in.count * lane / b.lanes + thread; i < end; i += threads) {
            if (is_floating(in.kind)) {
                float s = number == 1 ? load_float(in, i) : ((const float*)from)[i];
                ((float*)to)[i] = __fadd_rn(__fmul_rn((float)a, s), (float)c);
            } else {
                u64 s = number == 1 ? (u64)load_whole(in, i) : ((const u64*)from)[i];
                ((u64*)to)[i] = (u64)a * s + (u64)c;
            }
        }
    }
}

__device__ bool is_positive(const Input& in, const char* state, u64 i) {
    return is_floating(in.kind) ? ((const float*)state)[i] > 0.0f : ((const long long*)state)[i] > 0;
}

extern "C" __global__ void count(const Batch b) {
    u64 row = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= b.rows) return;
    const char* last = b.input[0].states + (b.steps - 1) * b.input[0].stride;
    u32 positive = 0;
    for (u64 i = 0; i < b.row_length; i++) positive += is_positive(b.input[0], last, row * b.row_length + i);
    b.counts[row] = positive;
    atomicMax(&b.counts[b.rows], positive);
}

extern "C" __global__ void tell(const Batch b) {
    b.pinned->longest[b.slot] = b.counts[b.rows];
    __threadfence_system();
}

extern "C" __global__ void pack(const Batch b) {
    u64 row = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= b.rows) return;
    const Input& in = b.input[0];
    const char* last = in.states + (b.steps - 1) * in.stride;
    u64 longest = b.counts[b.rows], at = row * longest;
    for (u64 i = row * b.row_length; i < (row + 1) * b.row_length; i++) {
        if (!is_positive(in, last, i)) continue;
        if (is_floating(in.kind)) store_float(in.kind, b.packed, at++, ((const float*)last)[i]);
        else store_whole(in.kind, b.packed, at++, ((const long long*)last)[i]);
    }
    for (; at < (row + 1) * longest; at++) {
        if (is_floating(in.kind)) store_float(in.kind, b.packed, at, 0.0f);
        else store_whole(in.kind, b.packed, at, 0);
    }
}

extern "C" __global__ void finish(const Batch b) {
    u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x, threads = (u64)gridDim.x * blockDim.x;
    for (u32 n = 0; n < b.inputs; n++) {
        const Input& in = b.input[n];
        const char* last = in.states + (b.steps - 1) * in.stride;
        for (u64 i = thread; i < in.count; i += threads) {
            if (is_floating(in.kind)) store_float(in.kind, in.target, i, ((const float*)last)[i]);
            else store_whole(in.kind, in.target, i, ((const long long*)last)[i]);
            // Overwrite the states, so that a batch that reads what it has not written gets wrong results.
            for (u32 k = 0; k < b.steps; k++) {
                char* state = in.states + k * in.stride;
                if (is_floating(in.kind)) ((float*)state)[i] = __uint_as_float(0x7fc00000u);
                else ((long long*)state)[i] = 0x7fffffffffffffffLL;
            }
        }
    }
    __threadfence();
    __syncthreads();
    // When the last block gets here, all others have written.
    if (threadIdx.x == 0 && atomicInc(&b.control->blocks[b.slot], gridDim.x - 1) == gridDim.x - 1) leave(b);
}

extern "C" __global__ void mark(const Batch b) {
    b.pinned->finished[0][b.slot] = atomicAdd(&b.control->finished[0][b.slot], 1u) + 1;
}
"""
