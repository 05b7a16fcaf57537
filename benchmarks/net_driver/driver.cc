// Drives a network of NCCL's through its C interface, one call for each line of standard input.
//
//   driver plugin LIBRARY VERSION    a plugin's table of that version
//   driver sockets LIBNCCL           NCCL's own socket transport
//   driver assigned LIBNCCL          the plugin that NCCL's own ncclNetInit loads and assigns
//
// Each line has one answer: "ok WORDS", "failed RESULT" with NCCL's result code, or "bad WHY" for a line that is wrong.
// Communicators, buffers and requests have the names that the lines give them. The calls are those of calls.h.
#include <cstdlib>
#include <iostream>

#include "calls.h"

void fail(const std::string& why) {
  std::cerr << "net driver: " << why << std::endl;
  std::_Exit(3);  // libraries' threads may run: nothing is unwound
}

namespace {

std::unique_ptr<Net> chosen(int count, char** words) {
  std::string kind = count > 2 ? words[1] : "";
  if (kind == "plugin" && count == 4) return net_of_plugin(words[2], atoi(words[3]));
  if (kind == "sockets" && count == 3) return net_of_nccl_sockets(words[2]);
  if (kind == "assigned" && count == 3) return net_that_nccl_assigns(words[2]);
  fail("usage: driver plugin LIBRARY VERSION | sockets LIBNCCL | assigned LIBNCCL");
}

}  // namespace

int main(int count, char** words) {
  auto net = chosen(count, words);
  Driver driver(*net);
  std::cout << "ok " << net->name() << std::endl;
  for (std::string line; std::getline(std::cin, line);) {
    std::string said;
    try {
      said = driver.answer(line);
    } catch (const std::exception& error) {  // of a line; the networks are C
      said = std::string("bad ") + error.what() + ": " + line;
    }
    std::cout << said << std::endl;
  }
  return 0;
}
