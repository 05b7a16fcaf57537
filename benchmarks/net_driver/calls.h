// The calls that the driver's lines name, with the communicators, buffers and requests of this process by their names.
#pragma once
#include <dirent.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include <map>
#include <sstream>
#include <vector>

#include "buffers.h"
#include "nccl_net.h"
#include "net.h"
#include "stream.h"
#include "words.h"

inline int entries(const char* directory) {
  int count = 0;
  DIR* open = opendir(directory);
  if (open == nullptr) fail(std::string(directory) + " is not readable");
  while (readdir(open) != nullptr) count++;
  closedir(open);
  return count - 2;
}

inline double clock_s() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

struct Request {
  void* request;
  int parts;
};

class Driver {
 public:
  explicit Driver(Net& net) : net_(net) {}

  std::string answer(const std::string& line) {
    Words words(line);
    std::string call = words.word();
    if (call == "init") return result(net_.init());
    if (call == "finalize") return result(net_.finalize());
    if (call == "devices") return devices();
    if (call == "properties") return properties(words);
    if (call == "listen") return listen(words);
    if (call == "connect") return connect(words);
    if (call == "accept") return accept(words);
    if (call == "buffer") return buffers_.fill(words);
    if (call == "check") return buffers_.check(words);
    if (call == "bytes") return buffers_.show(words);
    if (call == "register") return registers(words);
    if (call == "deregister") return deregisters(words);
    if (call == "isend") return isend(words);
    if (call == "irecv") return irecv(words);
    if (call == "iflush") return iflush(words);
    if (call == "test") return test(words);
    if (call == "wait") return wait(words);
    if (call == "close-send") return closed(words, &Net::closeSend);
    if (call == "close-receive") return closed(words, &Net::closeRecv);
    if (call == "close-listen") return closed(words, &Net::closeListen);
    if (call == "send-stream") return stream(words, send_stream);
    if (call == "receive-stream") return stream(words, receive_stream);
    if (call == "usage") return usage();
    throw Wrong("no call " + call);
  }

 private:
  static std::string result(int code) { return code == 0 ? "ok" : "failed " + std::to_string(code); }

  void* comm(Words& words) {
    auto found = comms_.find(words.word());
    if (found == comms_.end()) throw Wrong("no such communicator");
    return found->second;
  }
  std::vector<char>& memory(const std::string& name) { return buffers_.memory(name); }
  void* mhandle(const std::string& name) { return mhandles_[name]; }

  // A communicator that is not ready yet is "ok pending", as the interface wants the call repeated.
  std::string made(const std::string& name, int code, void* comm) {
    if (code != 0) return result(code);
    if (comm == nullptr) return "ok pending";
    comms_[name] = comm;
    return "ok ready";
  }

  std::string devices() {
    int count = 0;
    int code = net_.devices(&count);
    return code ? result(code) : "ok " + std::to_string(count);
  }

  std::string properties(Words& words) {
    Properties found{};
    int code = net_.properties(static_cast<int>(words.number()), &found);
    if (code != 0) return result(code);
    std::ostringstream text;
    text << "ok name=" << found.name << " pci=" << found.pci_path << " speed_mbps=" << found.speed_mbps
         << " port=" << found.port << " comms=" << found.most_comms << " receives=" << found.most_receives
         << " pointers=" << found.pointers;
    return text.str();
  }

  std::string listen(Words& words) {
    std::string name = words.word();
    unsigned char handle[nccl::HANDLE_BYTES] = {};
    void* listener = nullptr;
    int code = net_.listen(static_cast<int>(words.number()), handle, &listener);
    if (code != 0) return result(code);
    comms_[name] = listener;
    return "ok " + as_hex(handle, sizeof handle);
  }

  // connect NAME DEVICE HANDLE. The handle's memory is kept: transports keep the state of an attempt in it.
  std::string connect(Words& words) {
    std::string name = words.word();
    int device = static_cast<int>(words.number());
    std::string text = words.word();
    auto& handle = handles_[name];
    if (handle.empty()) {
      handle.resize(nccl::HANDLE_BYTES);
      for (size_t i = 0; i < nccl::HANDLE_BYTES && 2 * i + 1 < text.size(); i++) {
        handle[i] = static_cast<char>(std::stoi(text.substr(2 * i, 2), nullptr, 16));
      }
    }
    void* comm = nullptr;
    int code = net_.connect(device, handle.data(), &comm);
    if (code != 0 || comm != nullptr) handles_.erase(name);
    return made(name, code, comm);
  }

  std::string accept(Words& words) {
    std::string name = words.word();
    void* listener = comm(words);
    void* comm = nullptr;
    int code = net_.accept(listener, &comm);
    return made(name, code, comm);
  }

  std::string registers(Words& words) {  // register BUFFER COMM
    std::string name = words.word();
    auto& data = memory(name);
    return result(net_.regMr(comm(words), data.data(), data.size(), &mhandles_[name]));
  }

  std::string deregisters(Words& words) {  // deregister BUFFER COMM
    std::string name = words.word();
    return result(net_.deregMr(comm(words), mhandle(name)));
  }

  std::string posted(const std::string& name, int code, void* request, int parts) {
    if (code != 0) return result(code);
    if (request == nullptr) return "ok full";
    requests_[name] = {request, parts};
    return "ok posted";
  }

  std::string isend(Words& words) {  // isend REQUEST COMM BUFFER BYTES TAG
    std::string name = words.word();
    void* to = comm(words);
    std::string from = words.word();
    auto bytes = static_cast<size_t>(words.number());
    if (bytes > memory(from).size()) throw Wrong("the buffer is smaller");
    void* request = nullptr;
    int code = net_.isend(to, memory(from).data(), bytes, static_cast<int>(words.number()), mhandle(from), &request);
    return posted(name, code, request, 1);
  }

  std::string irecv(Words& words) {  // irecv REQUEST COMM (BUFFER BYTES TAG)...
    std::string name = words.word();
    void* from = comm(words);
    std::vector<void*> data, mhandles;
    std::vector<size_t> bytes;
    std::vector<int> tags;
    while (words.more()) {
      std::string to = words.word();
      data.push_back(memory(to).data());
      mhandles.push_back(mhandle(to));
      bytes.push_back(static_cast<size_t>(words.number()));
      if (bytes.back() > memory(to).size()) throw Wrong("the buffer is smaller");
      tags.push_back(static_cast<int>(words.number()));
    }
    int n = static_cast<int>(data.size());
    if (n > nccl::MAX_RECEIVES) throw Wrong("too many in a group");
    void* request = nullptr;
    int code = net_.irecv(from, n, data.data(), bytes.data(), tags.data(), mhandles.data(), &request);
    return posted(name, code, request, n);
  }

  std::string iflush(Words& words) {  // iflush REQUEST COMM BUFFER
    std::string name = words.word();
    void* from = comm(words);
    std::string to = words.word();
    void* data = memory(to).data();
    int bytes = static_cast<int>(memory(to).size());
    void* handle = mhandle(to);
    void* request = nullptr;
    int code = net_.iflush(from, 1, &data, &bytes, &handle, &request);
    return request == nullptr && code == 0 ? "ok nothing" : posted(name, code, request, 1);
  }

  std::string test(Words& words) {
    std::string name = words.word();
    auto found = requests_.find(name);
    if (found == requests_.end()) throw Wrong("no such request");
    int done = 0, bytes[nccl::MAX_RECEIVES] = {};
    int code = net_.test(found->second.request, &done, bytes);
    if (code != 0) return result(code);
    if (!done) return "ok pending";
    std::string text = "ok done";
    for (int i = 0; i < found->second.parts; i++) text += " " + std::to_string(bytes[i]);
    requests_.erase(found);
    return text;
  }

  std::string wait(Words& words) {  // wait LIMIT_S REQUEST: tests until it is done or has failed; or "ok pending"
    double limit_s = clock_s() + std::stod(words.word());
    std::string name = words.word();
    for (;;) {
      Words again(name);
      std::string said = test(again);
      if (said != "ok pending" || clock_s() > limit_s) return said;
      usleep(20);
    }
  }

  std::string closed(Words& words, int (Net::*close)(void*)) {
    std::string name = words.word();
    auto found = comms_.find(name);
    if (found == comms_.end()) throw Wrong("no such communicator");
    void* comm = found->second;
    comms_.erase(found);
    return result((net_.*close)(comm));
  }

  // ... DATA:ANSWER,... MESSAGE_BYTES MESSAGES SLICE_BYTES WINDOW ACKNOWLEDGE_EVERY NAP_US LIMIT_S
  std::string stream(Words& words, std::string (*move)(Net&, const std::vector<StreamLane>&, const StreamPlan&)) {
    std::vector<StreamLane> lanes;
    std::istringstream pairs(words.word());
    for (std::string pair; std::getline(pairs, pair, ',');) {
      auto colon = pair.find(':');
      if (colon == std::string::npos) throw Wrong("a lane is DATA:ANSWER");
      Words data(pair.substr(0, colon)), answer(pair.substr(colon + 1));
      lanes.push_back({comm(data), comm(answer)});
    }
    StreamPlan plan{};
    plan.message_bytes = static_cast<size_t>(words.number());
    plan.messages = static_cast<int>(words.number());
    plan.slice_bytes = static_cast<size_t>(words.number());
    plan.window = static_cast<int>(words.number());
    plan.acknowledge_every = static_cast<int>(words.number());
    plan.nap_us = static_cast<int>(words.number());
    plan.limit_s = std::stod(words.word());
    return move(net_, lanes, plan);
  }

  static std::string usage() {
    rusage used{};
    getrusage(RUSAGE_SELF, &used);
    std::ostringstream text;
    text << "ok descriptors=" << entries("/proc/self/fd") << " threads=" << entries("/proc/self/task") << " cpu_s="
         << static_cast<double>(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
                static_cast<double>(used.ru_utime.tv_usec + used.ru_stime.tv_usec) * 1e-6;
    return text.str();
  }

  Net& net_;
  std::map<std::string, void*> comms_;
  std::map<std::string, std::vector<char>> handles_;
  Buffers buffers_;
  std::map<std::string, void*> mhandles_;
  std::map<std::string, Request> requests_;
};
