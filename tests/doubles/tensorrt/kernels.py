"""The double's kernels, in CUDA C++ that is compiled at run time.

A batch is ``begin``, one ``step`` for each step, ``count``, ``tell`` and ``pack`` for a data-dependent
output, and ``finish``. All values are float32, rounded after every operation (``--fmad=false``), so the
results equal NumPy's bit by bit. ``cuda`` repeats the layout of ``struct Batch`` and ``struct Pinned`` field
by field; their sizes are compared when this is compiled.
"""

from typing import Final

SOURCE: Final = r"""
typedef unsigned int u32;
typedef unsigned long long u64;

enum { EXECUTING = 1, NOT_EXECUTED = 2, WRITTEN_TO = 3 };
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
    u32 started[2][2048], finished[2][2048], longest[2048];
    Record records[RECORDS];
};

struct Input { const float* source; float* target; char* states; u64 count, stride; };

struct Batch {
    Control* control;
    volatile Pinned* pinned;
    u64* guards[2];
    const long long* weights;
    float* packed;
    u32* counts;
    u64 work_ns, rows, row_length;
    u32 number, slot, captured, inputs, steps, cells;
    u32 cell[8], expected[8];
    Input input[4];
};

static_assert(sizeof(Batch) == BATCH_NBYTES, "Batch is laid out differently on the host");
static_assert(sizeof(Pinned) == PINNED_NBYTES, "Pinned is laid out differently on the host");
static_assert(sizeof(Control) == CONTROL_NBYTES, "Control is larger or smaller than what is allocated");

// The values after a step, which are numbered from 1 on.
__device__ float* state(const Input& in, u32 number) {
    return (float*)(in.states + (number - 1) * in.stride);
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

extern "C" __global__ void step(const Batch b, u32 number) {
    u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x, threads = (u64)gridDim.x * blockDim.x;
    float a = b.weights[2 * (number - 1)], c = b.weights[2 * (number - 1) + 1];
    for (u32 n = 0; n < b.inputs; n++) {
        const Input& in = b.input[n];
        const float* from = number == 1 ? in.source : state(in, number - 1);
        float* to = state(in, number);
        for (u64 i = thread; i < in.count; i += threads) to[i] = __fadd_rn(__fmul_rn(a, from[i]), c);
    }
}

extern "C" __global__ void count(const Batch b) {
    u64 row = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= b.rows) return;
    const float* last = state(b.input[0], b.steps);
    u32 positive = 0;
    for (u64 i = 0; i < b.row_length; i++) positive += last[row * b.row_length + i] > 0.0f;
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
    const float* last = state(b.input[0], b.steps);
    u64 longest = b.counts[b.rows], at = row * longest;
    for (u64 i = row * b.row_length; i < (row + 1) * b.row_length; i++)
        if (last[i] > 0.0f) b.packed[at++] = last[i];
    for (; at < (row + 1) * longest; at++) b.packed[at] = 0.0f;
}

extern "C" __global__ void finish(const Batch b) {
    u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x, threads = (u64)gridDim.x * blockDim.x;
    for (u32 n = 0; n < b.inputs; n++) {
        const Input& in = b.input[n];
        for (u64 i = thread; i < in.count; i += threads) {
            in.target[i] = state(in, b.steps)[i];
            // Overwrite the states, so that a batch that reads what it has not written gets wrong results.
            for (u32 k = 1; k <= b.steps; k++) state(in, k)[i] = __uint_as_float(0x7fc00000u);
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
