// Lines in NCCL's log, through the logger that NCCL gives at init. Without one, nothing is written.
#pragma once

#include "nccl_net.h"

namespace bagua {

void set_logger(nccl::Logger logger);

__attribute__((format(printf, 4, 5))) void write_log(nccl::LogLevel, const char* file, int line, const char* format, ...);

#define BAGUA_WARN(...) ::bagua::write_log(::nccl::LogWarn, __FILE__, __LINE__, "NET/Bagua : " __VA_ARGS__)
#define BAGUA_INFO(...) ::bagua::write_log(::nccl::LogInfo, __FILE__, __LINE__, "NET/Bagua : " __VA_ARGS__)

}  // namespace bagua
