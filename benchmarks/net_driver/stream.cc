#include "stream.h"

#include <sched.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <deque>

namespace {

constexpr int kTag = 7;

double now_s() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

double processor_s() {
  rusage used{};
  getrusage(RUSAGE_SELF, &used);
  auto seconds = [](const timeval& t) { return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) * 1e-6; };
  return seconds(used.ru_utime) + seconds(used.ru_stime);
}

// Requests of one direction of a communicator, finished in the order in which they were posted.
class Queue {
 public:
  Queue(Net& net, void* comm, bool sends, size_t slice_bytes, int window)
      : net_(net), comm_(comm), sends_(sends), slice_(slice_bytes), window_(window), memory_(slice_bytes * window, 'x') {
    result = net.regMr(comm, memory_.data(), memory_.size(), &mhandle_);
  }
  ~Queue() { net_.deregMr(comm_, mhandle_); }

  // Posts a slice if there is room; whether it did.
  bool post(size_t bytes) {
    if (result != 0 || static_cast<int>(requests_.size()) >= window_) return false;
    void* request = nullptr;
    void* data = memory_.data() + slice_ * (posted % window_);
    int tag = kTag;
    result = sends_ ? net_.isend(comm_, data, bytes, tag, mhandle_, &request)
                    : net_.irecv(comm_, 1, &data, &bytes, &tag, &mhandle_, &request);
    if (result != 0 || request == nullptr) return false;
    requests_.push_back(request);
    posted++;
    return true;
  }

  // Takes the oldest request if it has finished; whether it had.
  bool take() {
    if (result != 0 || requests_.empty()) return false;
    int finished = 0, bytes = 0;
    result = net_.test(requests_.front(), &finished, &bytes);
    if (result != 0 || !finished) return false;
    requests_.pop_front();
    done++;
    return true;
  }

  size_t posted = 0, done = 0;
  int result = 0;

 private:
  Net& net_;
  void* comm_;
  bool sends_;
  size_t slice_;
  int window_;
  std::vector<char> memory_;
  void* mhandle_ = nullptr;
  std::deque<void*> requests_;
};

struct Shape {
  explicit Shape(const StreamPlan& plan)
      : slice(std::min(plan.slice_bytes, std::max<size_t>(plan.message_bytes, 1))),
        slices((plan.message_bytes + slice - 1) / slice),
        last(plan.message_bytes - (slices - 1) * slice),
        round(slices * plan.acknowledge_every),
        rounds(plan.messages / plan.acknowledge_every) {}
  size_t bytes(size_t number) const { return number % slices == slices - 1 ? last : slice; }
  size_t slice, slices, last, round, rounds;
};

struct Lane {
  Lane(Net& net, const StreamLane& comms, bool sends, const StreamPlan& plan, const Shape& shape)
      : data(net, comms.data, sends, shape.slice, plan.window), answers(net, comms.answer, !sends, 4, 2) {}
  Queue data, answers;
};

// `step` moves one lane on and says whether it did; a lane is through when `through` says so.
template <class Step, class Through>
std::string run(Net& net, const std::vector<StreamLane>& comms, bool sends, const StreamPlan& plan, Step step,
                Through through) {
  Shape shape(plan);
  std::deque<Lane> lanes;
  for (const auto& lane : comms) lanes.emplace_back(net, lane, sends, plan, shape);
  std::vector<double> rounds;
  double began_s = now_s(), used_s = processor_s(), answered_s = began_s;
  for (bool all = false; !all;) {
    bool moved = false;
    all = true;
    for (auto& lane : lanes) {
      size_t before = lane.answers.done;
      moved |= step(lane, shape);
      if (int result = lane.data.result ? lane.data.result : lane.answers.result) {
        return "failed " + std::to_string(result);
      }
      if (lane.answers.done > before) {
        double at_s = now_s();
        rounds.push_back(at_s - answered_s);
        answered_s = at_s;
      }
      all &= through(lane, shape);
    }
    if (moved || all) continue;
    if (now_s() - began_s > plan.limit_s) return "failed timeout";
    plan.nap_us ? static_cast<void>(usleep(plan.nap_us)) : static_cast<void>(sched_yield());
  }
  double took_s = now_s() - began_s;
  std::sort(rounds.begin(), rounds.end());
  char words[160];
  snprintf(words, sizeof words, "ok %.6f %.6f %.6f", took_s, processor_s() - used_s,
           rounds.empty() ? took_s : rounds[rounds.size() / 2]);
  return words;
}

}  // namespace

std::string send_stream(Net& net, const std::vector<StreamLane>& lanes, const StreamPlan& plan) {
  return run(
      net, lanes, true, plan,
      [](Lane& lane, const Shape& shape) {
        bool moved = lane.data.take() | lane.answers.take();
        // the answer's receive is posted before its round, as NCCL posts receives ahead
        if (lane.answers.posted == lane.answers.done && lane.answers.posted < shape.rounds) moved |= lane.answers.post(4);
        if (lane.data.posted < (lane.answers.done + 1) * shape.round && lane.data.posted < shape.round * shape.rounds) {
          moved |= lane.data.post(shape.bytes(lane.data.posted));
        }
        return moved;
      },
      [](const Lane& lane, const Shape& shape) { return lane.answers.done == shape.rounds; });
}

std::string receive_stream(Net& net, const std::vector<StreamLane>& lanes, const StreamPlan& plan) {
  return run(
      net, lanes, false, plan,
      [](Lane& lane, const Shape& shape) {
        bool moved = lane.data.take() | lane.answers.take();
        if (lane.data.posted < shape.round * shape.rounds) moved |= lane.data.post(shape.bytes(lane.data.posted));
        if (lane.answers.posted < lane.data.done / shape.round) moved |= lane.answers.post(4);
        return moved;
      },
      [](const Lane& lane, const Shape& shape) { return lane.answers.done == shape.rounds; });
}
