// Who belongs to a group made of another group's members. Plain values; any thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace torchft_ext {

// As they were given. ValueError where they are not distinct ranks of a group of that size, or
// none. what: "split: ranks".
std::vector<int> checkedMembers(const std::string& what, const std::vector<int>& ranks, int size);
// All but these, in ascending order. ValueError as above, and where nobody would be left.
std::vector<int> membersWithout(const std::string& what, const std::vector<int64_t>& excluded,
                                int size);

// Names these members of a group of that size, and no others: a bit for each rank, in hexadecimal.
std::string nameOfMembers(const std::vector<int>& members, int size);

}  // namespace torchft_ext
