// A GPU's threads on one CPU thread, for cuda.cu compiled as C++: every CUDA thread is a fiber that runs until it has to wait.
//
// Thread blocks run one after the other, the threads of one block take turns. A barrier of the block or of a warp waits until
// all of its threads are there; one that not all threads reach is found, since then no thread can go on. Exports
// emulate(name, thread_blocks, arguments): 0, or 1 for an unknown kernel, 2 for threads that wait for each other for ever.
#include <ucontext.h>

#include <csetjmp>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __shared__ static  // thread blocks take turns

struct Index { unsigned x; };
static Index threadIdx, blockIdx;

namespace {

constexpr int kThreads = 256, kWarp = 32;
constexpr size_t kStack = 256 << 10;

struct Barrier { int arrived = 0; unsigned long round = 0; };

// Contexts only start fibers; jumps, which make no system call, switch between them.
ucontext_t fibers[kThreads];
jmp_buf places[kThreads], scheduler;
alignas(16) char stacks[kThreads][kStack];
bool started[kThreads], done[kThreads];
int running;
Barrier of_block, of_warp[kThreads / kWarp];
bool somebody_moved;
std::function<void()> body;

void let_others_run() {
  if (_setjmp(places[running]) == 0) _longjmp(scheduler, 1);
}

void wait_at(Barrier &barrier, int members) {
  unsigned long round = barrier.round;
  somebody_moved = true;
  if (++barrier.arrived == members) {
    barrier.arrived = 0;
    barrier.round++;
    return;
  }
  while (barrier.round == round) let_others_run();
  somebody_moved = true;
}

void fiber() {
  body();
  done[running] = true;
  somebody_moved = true;
  let_others_run();
}

// False if the threads of a block can't all end.
bool run_block() {
  of_block = Barrier();
  for (auto &barrier : of_warp) barrier = Barrier();
  for (int i = 0; i < kThreads; i++) {
    getcontext(&fibers[i]);
    fibers[i].uc_stack.ss_sp = stacks[i];
    fibers[i].uc_stack.ss_size = kStack;
    makecontext(&fibers[i], fiber, 0);
    started[i] = done[i] = false;
  }
  // volatile: a jump brings registers back as they were.
  for (volatile int left = kThreads; left > 0;) {
    somebody_moved = false;
    for (volatile int i = 0; i < kThreads; i = i + 1) {
      if (done[i]) continue;
      running = i;
      threadIdx.x = i;
      if (_setjmp(scheduler) == 0) {
        if (started[i]) _longjmp(places[i], 1);
        started[i] = true;
        setcontext(&fibers[i]);
      }
      if (done[i]) left = left - 1;
    }
    if (!somebody_moved) return false;
  }
  return true;
}

template <typename T>
T exchange(T mine, int from) {
  static T slots[kThreads];
  int warp = running / kWarp;
  slots[running] = mine;
  wait_at(of_warp[warp], kWarp);
  T theirs = from >= 0 && from < kWarp ? slots[warp * kWarp + from] : mine;
  wait_at(of_warp[warp], kWarp);
  return theirs;
}

}  // namespace

static void __syncthreads() { wait_at(of_block, kThreads); }
template <typename T>
static T __shfl_xor_sync(unsigned, T mine, int mask) { return exchange(mine, (running % kWarp) ^ mask); }
template <typename T>
static T __shfl_down_sync(unsigned, T mine, int distance) { return exchange(mine, running % kWarp + distance); }

#include "cuda.cu"

template <typename... A, size_t... I>
static std::function<void()> with_arguments(void (*kernel)(A...), void **arguments, std::index_sequence<I...>) {
  return [=] { kernel(*(std::remove_const_t<A> *)arguments[I]...); };
}

template <typename... A>
static std::function<void()> with_arguments(void (*kernel)(A...), void **arguments) {
  return with_arguments(kernel, arguments, std::index_sequence_for<A...>());
}

extern "C" int emulate(const char *name, long thread_blocks, void **arguments) {
  const std::map<std::string, std::function<std::function<void()>()>> kernels = {
#define NAMED(kernel) {#kernel, [=] { return with_arguments(kernel, arguments); }}
      NAMED(bagua_minmax_compress), NAMED(bagua_minmax_reduce),    NAMED(bagua_one_bit_compress), NAMED(bagua_decode),
      NAMED(bagua_weighted_average), NAMED(bagua_add_difference), NAMED(bagua_adam_steps),       NAMED(bagua_adam_gradients),
      NAMED(bagua_adam_update),      NAMED(bagua_copy_parts),
  };
  auto found = kernels.find(name);
  if (found == kernels.end()) return 1;
  body = found->second();
  for (long block = 0; block < thread_blocks; block++) {
    blockIdx.x = (unsigned)block;
    if (!run_block()) return 2;
  }
  return 0;
}
