// What a member tells one that waits for it: what it has issued, and what its main thread does. The
// payload of a kReport frame, of one fixed size.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "comm/operation_recorder.h"
#include "host/main_thread.h"

namespace torchft_ext {

struct IssueReport {
  struct Issued {
    OpKind kind = OpKind::kBarrier;
    int root = 0;
    int64_t seq = -1;
    Duration age{0};  // by the reporter's clock
    friend bool operator==(const Issued&, const Issued&) = default;
  };

  uint64_t collectives = 0;  // issued in the order of all ranks
  // Which of them was asked about; kNoPlace: none.
  uint64_t place = kNoPlace;
  std::optional<Issued> asked;  // the collective at `place`; nullopt: none yet, or it is forgotten
  std::optional<Issued> last;   // of all operations; nullopt: none yet
  MainThreadNow main_thread{};
  friend bool operator==(const IssueReport&, const IssueReport&) = default;
};

// Of what is recorded of that generation. Reads a small file of /proc. Any thread.
IssueReport reportOf(const OperationRecorder& recorder, int64_t generation, uint64_t place);
std::string encode(const IssueReport& report);
// nullopt: no report. Roots may be out of the generation: they are for texts alone.
std::optional<IssueReport> decodeReport(std::string_view payload);

}  // namespace torchft_ext
