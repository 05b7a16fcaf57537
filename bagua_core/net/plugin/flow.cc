#include "flow.h"

#include <algorithm>

namespace bagua {
namespace {

constexpr double SAMPLE_EVERY_S = 0.005, FORGET_S = 1;
constexpr double LEAST_BUSY_S = 0.01;  // of a measurement: the kernel counts in steps of 1 to 10 ms
constexpr double ROUND_TRIPS = 1.5;    // of a sample at least: acknowledgements may come once in a round trip

}  // namespace

double Flow::queued(Clock::time_point now) const {
  double drained = std::max(rate_, 0.0) * seconds_since(sampled_, now);
  return std::max(static_cast<double>(written_ - acknowledged_) - drained, 0.0);
}

void Flow::sample_if_due(Clock::time_point now, int fd) {
  if (seconds_since(sampled_, now) >= every_s_) sample(now, health_of(fd));
}

void Flow::sample(Clock::time_point now, const Health& health) {
  if (every_s_ == 0) written_ += health.acknowledged;  // the hello came before
  every_s_ = std::max(SAMPLE_EVERY_S, ROUND_TRIPS * health.round_trip_s);
  sampled_ = now;
  acknowledged_ = std::min(health.acknowledged, written_);
  double busy_s = health.busy_s - busy_before_s_;
  if (busy_s < std::max(LEAST_BUSY_S, every_s_)) {
    if (seconds_since(measured_, now) > FORGET_S) rate_ = -1;
    return;
  }
  double rate = static_cast<double>(acknowledged_ - acknowledged_before_) / busy_s;
  rate_ = rate_ < 0 ? rate : (rate_ + rate) / 2;
  measured_ = now;
  acknowledged_before_ = acknowledged_;
  busy_before_s_ = health.busy_s;
}

}  // namespace bagua
