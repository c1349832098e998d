// A rank that cannot make its group has that told to the ranks that wait for it.
#pragma once

#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "base/deadline.h"

namespace torchft_ext {

// In the first generation of a group whose members meet in this store. Blocks until they have
// read it, for two seconds at most once the store answers, 15 in all, or the limit. Where no thread
// can be had it asks the store itself, for as long as that takes to answer. Nothing where
// there are no others, or where the store cannot be used: the reason why is what the caller wants
// to tell. Throws what a signal's handler throws.
void publishFailedInit(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                       Duration limit, const std::string& why);

}  // namespace torchft_ext
