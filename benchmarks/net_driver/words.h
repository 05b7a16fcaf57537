// A line of the driver's input, read word by word.
#pragma once
#include <sstream>
#include <stdexcept>
#include <string>

struct Wrong : std::runtime_error {
  using runtime_error::runtime_error;
};

class Words {
 public:
  explicit Words(const std::string& line) : words_(line) {}
  std::string word() {
    std::string found;
    if (!(words_ >> found)) throw Wrong("too few words");
    return found;
  }
  long number() { return std::stol(word()); }
  bool more() { return (words_ >> std::ws).good(); }

 private:
  std::istringstream words_;
};
