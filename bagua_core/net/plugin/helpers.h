// Threads that move bytes beside the callers of test: BAGUA_NET_THREADS of a process, asleep while nothing is to do.
#pragma once

namespace bagua {

class Communicator;

namespace Helpers {
void add(Communicator*);
void remove(Communicator*);  // returns when no helper works on it
void wake();                 // a communicator has more to move than its caller could at once
}  // namespace Helpers

}  // namespace bagua
