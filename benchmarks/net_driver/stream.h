// Moves many messages as NCCL's proxy does: slices of a bounded size, several in flight, every communicator in one thread.
#pragma once
#include <string>
#include <vector>

#include "net.h"

struct StreamPlan {
  size_t message_bytes, slice_bytes;
  int messages, window;
  int acknowledge_every;  // messages; the sender waits for an empty answer after so many
  int nap_us;             // pause after a round without progress; 0: sched_yield, as NCCL's proxy
  double limit_s;
};

struct StreamLane {
  void* data;    // communicator that carries the messages
  void* answer;  // communicator of the other direction
};

// Seconds and processor time of the whole, and the median seconds between two answers; or the reason of a failure.
std::string send_stream(Net& net, const std::vector<StreamLane>& lanes, const StreamPlan& plan);
std::string receive_stream(Net& net, const std::vector<StreamLane>& lanes, const StreamPlan& plan);
