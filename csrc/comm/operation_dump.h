// The contents of a dump: the operations of some generations under the keys that torch's analyser
// reads (torch.distributed.flight_recorder), and further keys for torchft_ext.analyze.
#pragma once

#include <string>
#include <vector>

#include "comm/dump_writer.h"
#include "comm/operation_recorder.h"

namespace torchft_ext {

enum class DumpFor {
  kTorch,    // a pickle: the collectives alone, since torch matches each entry with all ranks
  kAnalyze,  // JSON: messages and what callbacks issued, too
};
// The text of it. Any thread. Never blocks.
std::string dumpOf(const std::vector<OperationRecorder::Snapshot>& snapshots, DumpFor reader);

}  // namespace torchft_ext
