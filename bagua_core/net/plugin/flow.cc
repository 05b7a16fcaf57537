#include "flow.h"

#include <algorithm>

namespace bagua {
namespace {

constexpr double SAMPLE_EVERY_S = 0.005, FORGET_S = 1;
constexpr double LEAST_BUSY_S = 0.01;  // of a measurement: the kernel counts in steps of 1 to 10 ms
constexpr double ROUND_TRIPS = 1.5;    // of a measurement at least: acknowledgements may come once in a round trip
// From here on the round trip says that bytes wait on the path.
constexpr double QUEUE_ROUND_TRIPS = 1.5, QUEUE_S = 0.0001;

}  // namespace

double Flow::queued(Clock::time_point now, double bandwidth_if_not_measured) const {
  double drained = rate(bandwidth_if_not_measured) * seconds_since(sampled_, now);
  return std::max(static_cast<double>(written_ - acknowledged_) - drained, 0.0);
}

void Flow::sample_if_due(Clock::time_point now, int fd) {
  if (!began_ || seconds_since(sampled_, now) >= SAMPLE_EVERY_S) sample(now, health_of(fd));
}

void Flow::sample(Clock::time_point now, const Health& health) {
  if (!began_) written_ += health.acknowledged;  // the hello came before
  began_ = true;
  sampled_ = now;
  acknowledged_ = std::min(health.acknowledged, written_);
  round_trip_s_ = health.least_round_trip_s;
  window_rate_ = static_cast<double>(health.window_bytes) / std::max(health.least_round_trip_s, 1e-6);
  if (health.paced_rate > 0) window_rate_ = std::min(window_rate_, health.paced_rate);
  measure(now, health);
}

void Flow::measure(Clock::time_point now, const Health& health) {
  double busy_s = health.busy_s - busy_before_s_;
  if (busy_s < std::max(LEAST_BUSY_S, ROUND_TRIPS * health.round_trip_s)) {
    if (seconds_since(measured_, now) > FORGET_S) bandwidth_ = -1;
    return;
  }
  double moved = static_cast<double>(acknowledged_ - acknowledged_before_) / busy_s;
  bool has_queue = health.round_trip_s > QUEUE_ROUND_TRIPS * health.least_round_trip_s + QUEUE_S;
  // Where nothing waits on the path, the application or the window was the limit, and the path may move more.
  if (has_queue)
    bandwidth_ = bandwidth_ < 0 ? moved : (bandwidth_ + moved) / 2;
  else if (bandwidth_ >= 0)
    bandwidth_ = std::max(bandwidth_, moved);
  measured_ = now;
  acknowledged_before_ = acknowledged_;
  busy_before_s_ = health.busy_s;
}

}  // namespace bagua
