// Files of what groups have recorded: one for each generation that fails, where
// TORCH_FR_DUMP_TEMP_FILE is set, and one whenever a program asks for it.
//
// The variable is a prefix as torch takes it: a folder, and how names begin. Behind it stand the
// process's rank in the group's first generation, the failed generation's number and id, and the
// rank in that:
//   PREFIX3.generation2_1f0c82aa_2        a pickle for torch's analyser
//   PREFIX3.generation2_1f0c82aa.2.json   for torchft_ext.analyze
// torch reads what is left of a name behind a common part as a rank, so the second one's has not
// got that part. A file appears whole or not at all.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/operation_recorder.h"

namespace torchft_ext {

// Generations that a process writes at most: one that fails again and again fills no disk.
inline constexpr int kMostFailureDumps = 20;

// dumpEverything() and waitsOfProcess() have it from now on. Holds no recorder alive. Any thread.
void rememberRecorder(const std::shared_ptr<OperationRecorder>& recorder);

// The value of the environment variable. Empty: no dumps are written. No other thread may change
// the environment meanwhile.
std::string failureDumpPrefix();

// Has a callback thread write the dumps of a generation that has failed, if there is a prefix. Any
// thread, never blocks.
void dumpFailedGeneration(const std::shared_ptr<OperationRecorder>& recorder, int64_t generation,
                          const std::string& prefix);

// Whom the process's groups wait for, each in a clause: OperationRecorder::waits(). Any thread,
// never blocks.
std::vector<std::string> waitsOfProcess();

// Writes what all groups of the process have recorded: JSON where the path ends in ".json", else a
// pickle. Blocks for the disk. 0, or an errno.
int dumpEverything(const std::string& path);

}  // namespace torchft_ext
