from tests.book.run import main

main()
