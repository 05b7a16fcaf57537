// What a sending connection can move: the measured bandwidth of its path, and its congestion window.
//
// The kernel's estimate (tcpi_delivery_rate) is of single bursts: it says gigabytes a second where a shaper lets the
// first packets pass, on a flow that moves megabytes. So this divides what was acknowledged by the time that it took.
#pragma once

#include <algorithm>
#include <cstdint>

#include "sockets.h"

namespace bagua {

class Flow {
 public:
  void wrote(std::size_t bytes) { written_ += bytes; }

  // Bytes a second of the path; negative: not measured.
  double bandwidth() const { return bandwidth_; }
  // Bytes a second that the connection moves now: no more than its window in a round trip.
  double rate(double bandwidth_if_not_measured) const {
    return std::max(std::min(bandwidth_ < 0 ? bandwidth_if_not_measured : bandwidth_, window_rate_), 1.0);
  }
  // Without what queues add. Nothing ends sooner.
  double round_trip_s() const { return round_trip_s_; }
  // Estimate of the bytes that are not acknowledged.
  double queued(Clock::time_point now, double bandwidth_if_not_measured) const;
  // Seconds until these bytes more are acknowledged.
  double ends_in_s(Clock::time_point now, std::size_t bytes, double bandwidth_if_not_measured) const {
    return (queued(now, bandwidth_if_not_measured) + static_cast<double>(bytes)) / rate(bandwidth_if_not_measured);
  }

  // Asks the kernel if it was not asked lately.
  void sample_if_due(Clock::time_point now, int fd);
  void sample(Clock::time_point now, const Health&);

 private:
  void measure(Clock::time_point now, const Health&);

  std::uint64_t written_ = 0, acknowledged_ = 0;  // acknowledged: as of `sampled_`
  double bandwidth_ = -1, window_rate_ = 0, round_trip_s_ = 0;
  bool began_ = false;
  Clock::time_point sampled_{};
  Clock::time_point measured_{};           // the last measurement, used or not
  std::uint64_t acknowledged_before_ = 0;  // as of then
  double busy_before_s_ = 0;
};

}  // namespace bagua
