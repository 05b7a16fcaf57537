// The measured speed of a sending connection.
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

  // Bytes a second; negative: not measured.
  double rate() const { return rate_; }
  // Estimate of the bytes that are not acknowledged.
  double queued(Clock::time_point now) const;
  // Seconds until these bytes more are acknowledged.
  double ends_in_s(Clock::time_point now, std::size_t bytes, double rate_if_not_measured) const {
    return (queued(now) + static_cast<double>(bytes)) / std::max(rate_ < 0 ? rate_if_not_measured : rate_, 1.0);
  }

  // Asks the kernel if it was not asked lately.
  void sample_if_due(Clock::time_point now, int fd);

 private:
  void sample(Clock::time_point now, const Health&);

  std::uint64_t written_ = 0, acknowledged_ = 0;  // acknowledged: as of `sampled_`
  double rate_ = -1, every_s_ = 0;
  Clock::time_point sampled_{};
  Clock::time_point measured_{};           // when `rate_` changed last
  std::uint64_t acknowledged_before_ = 0;  // as of then
  double busy_before_s_ = 0;
};

}  // namespace bagua
