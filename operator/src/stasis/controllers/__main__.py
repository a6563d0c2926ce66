from stasis.controllers.main import main

main()
