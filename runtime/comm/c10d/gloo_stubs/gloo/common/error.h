// Other headers of Gloo include this one, and nothing that it declares is used here (../../README.md).
#pragma once
